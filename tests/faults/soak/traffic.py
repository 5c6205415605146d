"""What the clients of a soak do: requests of every kind, over both protocols, many of which they leave or cancel.

Each kind is a coroutine that sends one request or a few, compares responses with what it asked for, and writes each
into the ledger. Kinds are drawn at random, from a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from protocols.grpc.generated import grpc_service_pb2 as pb
from tests.faults.client import (
    SERVICE,
    TIMEOUT_S,
    Client,
    Refused,
    bytes_body,
    expect_success,
    number_body,
    number_message,
    returned_number,
)
from tests.faults.ledger import Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# ---- requests that are waited for -----------------------------------------------------------


async def http_json(client: Client) -> None:
    model = client.random.choice(["obey", "call", "reloaded"])
    number = client.next_id()
    async with client.counted(f"HTTP JSON {model}"):
        found = expect_success(*await client.post(f"/v2/models/{model}/infer", number_body(number)))
        assert found["outputs"][0]["data"] == [number], "another request's response"


async def http_binary(client: Client) -> None:
    model = client.random.choice(["echo", "pair"])
    content = client.random.randbytes(client.random.choice([16, 5_000, 100_000, 600_000]))
    async with client.counted(f"HTTP binary {model}"):
        body, headers = bytes_body(content)
        if client.random.random() < 0.2:
            body, headers = gzip.compress(body, 1), {**headers, "Content-Encoding": "gzip"}
        status, found = await client.post(f"/v2/models/{model}/infer", body, headers)
        if status != 200:
            expect_success(status, found)
        assert found.endswith(content), "other bytes"


async def http_large_json(client: Client) -> None:
    values = [client.random.randrange(256) for _ in range(20_000)]
    tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [len(values)], "data": values}
    async with client.counted("HTTP large JSON"):
        found = expect_success(*await client.post("/v2/models/echo/infer", json.dumps({"inputs": [tensor]})))
        assert found["outputs"][0]["data"] == values, "other values"


async def grpc_number(client: Client) -> None:
    model = client.random.choice(["obey", "call", "reloaded"])
    number = client.next_id()
    async with client.counted(f"gRPC {model}"):
        call = client.grpc.unary_unary(f"{SERVICE}ModelInfer")
        response = await call(number_message(model, number), timeout=TIMEOUT_S)
        assert returned_number(response) == number, "another request's response"


async def grpc_bytes(client: Client) -> None:
    model = client.random.choice(["echo", "pair"])
    content = client.random.randbytes(client.random.choice([16, 5_000, 100_000, 600_000]))
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="UINT8", shape=[len(content)])
    message = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[content])
    async with client.counted(f"gRPC bytes {model}"):
        call = client.grpc.unary_unary(f"{SERVICE}ModelInfer")
        response = await call(message.SerializeToString(), timeout=TIMEOUT_S)
        assert pb.ModelInferResponse.FromString(response).raw_output_contents[0] == content, "other bytes"


async def grpc_stream(client: Client) -> None:
    """A stream of a decoupled model, which is read to its end or left on the way."""
    count = client.random.choice([0, 1, 10, 50])
    left = count > 1 and client.random.random() < 0.4
    async with client.counted("gRPC stream"):
        stream = client.grpc.stream_stream(f"{SERVICE}ModelStreamInfer")(timeout=TIMEOUT_S)
        await stream.write(number_message("repeat", count, (1,)))
        for number in range(count // 2 if left else count):
            response = pb.ModelStreamInferResponse.FromString(await stream.read())
            if response.error_message:
                raise Refused(response.error_message)
            assert returned_number(response.infer_response.SerializeToString()) == number, "out of order"
        if left:
            stream.cancel()
            raise asyncio.CancelledError
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF, "one response too many"


async def sequence(client: Client) -> None:
    """A sequence, of which one in five is never ended."""
    number = client.next_sequence()
    length = client.random.randrange(1, 6)
    abandoned = client.random.random() < 0.2
    total = 0
    for index in range(length):
        value, last = client.random.randrange(100), index == length - 1 and not abandoned
        parameters = {"sequence_id": number, "sequence_start": index == 0, "sequence_end": last}
        async with client.counted("HTTP sequence"):
            body = number_body(value, parameters=parameters)
            found = expect_success(*await client.post("/v2/models/sum/infer", body))
            total += value
            assert found["outputs"][0]["data"] == [total], "another sequence's sum"


async def shared_memory(client: Client) -> None:
    """A region that is registered, used by both protocols and unregistered; some are shortened or removed before."""
    name = client.next_region()
    path = Path("/dev/shm", name)
    content = client.random.randbytes(client.random.choice([64, 70_000]))
    harm = client.random.choice(["none", "none", "none", "shortened", "unlinked"])
    path.write_bytes(content + bytes(len(content)))
    try:
        async with client.counted("register a region"):
            where = {"key": f"/{name}", "offset": 0, "byte_size": 2 * len(content)}
            status, body = await client.post(f"/v2/systemsharedmemory/region/{name}/register", json.dumps(where))
            if status != 200:
                expect_success(status, body)
        if harm == "shortened":
            os.truncate(path, len(content) // 2)
        elif harm == "unlinked":
            path.unlink()
        async with client.counted("HTTP region"):
            there = {"shared_memory_region": name, "shared_memory_byte_size": len(content)}
            tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [len(content)], "parameters": there}
            output = {"name": "OUTPUT0", "parameters": {**there, "shared_memory_offset": len(content)}}
            body_text = json.dumps({"inputs": [tensor], "outputs": [output]})
            expect_success(*await client.post("/v2/models/echo/infer", body_text))
            if harm == "none":
                assert path.read_bytes()[len(content) :] == content, "other bytes in the region"
            assert harm != "shortened", "a region that is too short was used"
    finally:
        async with client.counted("unregister a region"):
            status, body = await client.post(f"/v2/systemsharedmemory/region/{name}/unregister", "{}")
            if status != 200:
                expect_success(status, body)
        path.unlink(missing_ok=True)


# ---- requests that clients leave ------------------------------------------------------------


async def grpc_cancelled(client: Client) -> None:
    """A call that is cancelled, in the queue or while it is executed."""
    async with client.counted("gRPC cancelled"):
        call = client.grpc.unary_unary(f"{SERVICE}ModelInfer")(number_message("obey", -200), timeout=TIMEOUT_S)
        await asyncio.sleep(client.random.random() * 0.03)
        call.cancel()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call


async def http_left(client: Client) -> None:
    """A client that leaves: in the head, in the body, or before the response."""
    if client.random.random() < 0.5:
        body, headers = number_body(-200).encode(), dict[str, str]()
        path = "/v2/models/obey/infer"
    else:
        body, headers = bytes_body(bytes(100_000))
        path = "/v2/models/echo/infer"
    lines = [f"POST {path} HTTP/1.1", "Host: soak", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    content = "\r\n".join([*lines, "", ""]).encode() + body
    number = client.ledger.begin("HTTP left")
    host, _, port = client.http_url.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    end = client.random.choice([len(content), client.random.randrange(len(content)), client.random.randrange(60)])
    writer.write(content[:end])
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        await asyncio.sleep(client.random.random() * 0.02)
    if client.random.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()
    client.ledger.end(number, Outcome.LEFT)


async def generate_left(client: Client) -> None:
    """A stream of events, read to its end or left after the first ones."""
    count = client.random.choice([1, 20, 200])
    left = client.random.random() < 0.5
    async with client.counted("HTTP generate_stream"):
        path = "/v2/models/repeat/generate_stream"
        async with client.http.post(path, data=json.dumps({"IN": count})) as response:
            if response.status != 200:
                expect_success(response.status, await response.read())
            seen = 0
            async for line in response.content:
                if line.startswith(b"data:"):
                    found = json.loads(line.removeprefix(b"data:"))
                    if "error" in found:
                        raise Refused(found["error"])
                    seen += 1
                    if left and seen > 3:
                        response.close()
                        raise asyncio.CancelledError
            assert seen == count, f"{seen} events of {count}"


# ---- mistakes, and what operators do --------------------------------------------------------


async def mistakes(client: Client) -> None:
    """Requests that are wrong in some way: each gets an error that says why, with Triton's status for it."""
    path, body = client.random.choice([
        ("/v2/models/unknown/infer", number_body(1)),
        ("/v2/models/obey/infer", number_body(1, name="OTHER")),
        ("/v2/models/obey/infer", number_body(1, shape=(1, 7))),
        ("/v2/models/obey/infer", "{" * 50),
        ("/v2/models/obey/versions/99/infer", number_body(1)),
        ("/v2/models/repeat/infer", number_body(3, shape=(1,))),
        ("/v2/systemsharedmemory/region/none/register", json.dumps({"key": "/no_such", "offset": 0, "byte_size": 8})),
        ("/v2/repository/models/reloaded/load", json.dumps({"parameters": {"config": '{"max_batch_size": "x"}'}})),
        ("/v2/repository/models/unknown/load", "{}"),
    ])  # fmt: skip
    async with client.counted("mistake"):
        status, found = await client.post(path, body)
        assert 400 <= status < 502, f"{status} for a mistake"
        assert b"internal error" not in found, f"{found[:100]!r}"
        expect_success(status, found)


async def load(client: Client) -> None:
    """Load a model again with another configuration, or unload it and load it."""
    async with client.counted("load"):
        if client.random.random() < 0.3:
            status, body = await client.post("/v2/repository/models/reloaded/unload", "{}")
            if status != 200:
                expect_success(status, body)
        config = {"max_batch_size": client.random.choice([1, 2, 4, 8]), "backend": "python"}
        config |= {
            "input": [{"name": "IN", "data_type": "TYPE_INT64", "dims": [1]}],
            "output": [{"name": "OUT", "data_type": "TYPE_INT64", "dims": [1]}],
            "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        }
        parameters = {"parameters": {"config": json.dumps(config)}} if client.random.random() < 0.7 else {}
        status, body = await client.post("/v2/repository/models/reloaded/load", json.dumps(parameters))
        if status != 200:
            expect_success(status, body)


async def look(client: Client) -> None:
    """Read what operators read."""
    path = client.random.choice(
        ["/v2/models/stats", "/v2/health/ready", "/v2", "/v2/models/obey/config", "/v2/systemsharedmemory/status"]
    )
    async with client.counted("look"), client.http.get(path) as response:
        await response.read()


#: What a client does, and how often compared with the others.
KINDS: list[tuple[Callable[[Client], Awaitable[None]], float]] = [
    (http_json, 10),
    (http_binary, 6),
    (http_large_json, 0.5),
    (grpc_number, 10),
    (grpc_bytes, 6),
    (grpc_stream, 4),
    (sequence, 2),
    (shared_memory, 2),
    (grpc_cancelled, 3),
    (http_left, 4),
    (generate_left, 2),
    (mistakes, 3),
    (load, 0.15),
    (look, 1),
]

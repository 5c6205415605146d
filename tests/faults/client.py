"""A client of both protocols that notes each request in a ledger, and the requests that the models take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc

from protocols.grpc.generated import grpc_service_pb2 as pb
from tests.faults.ledger import Ledger, Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from random import Random

#: How long a client waits for a response that nothing should delay as long.
TIMEOUT_S = 60.0

SERVICE = "/inference.GRPCInferenceService/"


class Client:
    """Connections to one server. `open` and `close` may be called again and again."""

    def __init__(self, http_url: str, grpc_url: str, random: Random) -> None:
        self.http_url, self.grpc_url = http_url, grpc_url
        self.random = random
        self.ledger = Ledger()
        self._ids = 0
        self._sequences = 0
        self._regions = 0
        self._http: aiohttp.ClientSession | None = None
        self._grpc: grpc.aio.Channel | None = None

    def open(self) -> None:
        self._http = aiohttp.ClientSession(f"http://{self.http_url}", timeout=aiohttp.ClientTimeout(TIMEOUT_S))
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._grpc = grpc.aio.insecure_channel(self.grpc_url, options)

    async def close(self) -> None:
        if self._http is not None and self._grpc is not None:
            await self._http.close()
            await self._grpc.close()

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http is not None
        return self._http

    @property
    def grpc(self) -> Any:
        assert self._grpc is not None
        return self._grpc

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    def next_sequence(self) -> int:
        self._sequences += 1
        return self._sequences

    def next_region(self) -> str:
        self._regions += 1
        return f"naiad_soak_{os.getpid()}_{self._regions}"

    async def post(self, path: str, body: bytes | str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Return the status and the body of a response."""
        async with self.http.post(path, data=body, headers=headers) as response:
            return response.status, await response.read()

    @contextlib.asynccontextmanager
    async def counted(self, kind: str) -> AsyncIterator[None]:
        """Count a request: its response is right if the block ends, an exception says what else became of it."""
        number = self.ledger.begin(kind)
        try:
            yield
        except AssertionError as error:
            self.ledger.end(number, Outcome.WRONG, str(error))
        except Refused as error:
            self.ledger.end(number, Outcome.ERROR, str(error))
        except grpc.aio.AioRpcError as error:
            hung = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            outcome = Outcome.HUNG if hung else Outcome.ERROR
            self.ledger.end(number, outcome, f"{error.code().name} {error.details()}")
        except TimeoutError:
            self.ledger.end(number, Outcome.HUNG)
        except (aiohttp.ClientError, ConnectionError) as error:
            self.ledger.end(number, Outcome.CUT, repr(error))
        except asyncio.CancelledError:
            self.ledger.end(number, Outcome.LEFT)
        else:
            self.ledger.end(number, Outcome.OK)


class Refused(Exception):
    """The server responded with an error; the message is its status and text."""


def expect_success(status: int, body: bytes) -> Any:
    """Return the JSON of a response. Raises `Refused` if it is an error, which must say why."""
    if status != 200:
        text = json.loads(body)["error"]
        assert text
        raise Refused(f"{status} {text}")
    return json.loads(body)


def number_body(number: int, name: str = "IN", shape: tuple[int, ...] = (1, 1), **more: Any) -> str:
    """Return the JSON of a request with one INT64."""
    return json.dumps({"inputs": [{"name": name, "datatype": "INT64", "shape": shape, "data": [number]}], **more})


def bytes_body(content: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request with bytes behind the JSON."""
    tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [len(content)]}
    head = json.dumps({
        "inputs": [{**tensor, "parameters": {"binary_data_size": len(content)}}],
        "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
    }).encode()  # fmt: skip
    return head + content, {"Inference-Header-Content-Length": str(len(head))}


def number_message(model: str, number: int, shape: tuple[int, ...] = (1, 1)) -> bytes:
    """Return a ModelInferRequest with one INT64."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="INT64", shape=shape)
    message = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[struct.pack("<q", number)])
    return message.SerializeToString()


def returned_number(response: bytes) -> int:
    """Return the INT64 of a ModelInferResponse."""
    number: int = struct.unpack("<q", pb.ModelInferResponse.FromString(response).raw_output_contents[0])[0]
    return number

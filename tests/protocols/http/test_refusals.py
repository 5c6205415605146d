"""Requests that are refused by their head alone, with the same responses on the fast path and in aiohttp."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kernel.options import AdminOptions, HttpOptions
from protocols.http.metrics.server import MetricsServer
from protocols.http.openapi.paths import generic_paths
from protocols.http.routes import find_endpoint
from protocols.http.server import HttpServer
from protocols.request_limits import MAX_CONTROL_BYTE_SIZE
from tests.protocols.front_door_lab import listening

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from kernel.serving.kernel import Kernel

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]

INFER = "/v2/models/echo/infer"
BODY = json.dumps({"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}]})
EVIL = "Origin: https://evil.example"

#: Every POST, with whether it is for those who administer the server.
POSTS = {
    INFER: False,
    "/v2/models/echo/generate": False,
    "/v2/models/echo/generate_stream": False,
    "/v2/repository/index": False,
    "/v2/repository/models/echo/load": True,
    "/v2/repository/models/echo/unload": True,
    "/v2/models/echo/poison/clear": True,
    "/v2/models/echo/traffic": True,
    "/v2/models/echo/traffic/reset": True,
    "/v2/models/echo/feedback": False,
    "/v2/models/echo/rollout": True,
    "/v2/models/echo/rollout/abort": True,
    "/v2/logging": True,
    "/v2/trace/setting": True,
    "/v2/models/echo/trace/setting": True,
    "/v2/systemsharedmemory/region/r/register": True,
    "/v2/systemsharedmemory/unregister": True,
    "/v2/cudasharedmemory/region/r/register": True,
    "/v2/cudasharedmemory/region/r/unregister": True,
}


class Client:
    """A connection that sends requests as they are written here."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        self._reader = reader
        self._writer = writer
        self.port = port

    async def call(self, method: str, path: str, *lines: str, body: str = "", host: str = "") -> tuple[int, str]:
        """Return the status and the error of the response, or its body."""
        lines = (f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", *lines)
        self.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]))
        return await self.read()

    def write(self, text: str) -> None:
        self._writer.write(text.encode())

    async def read(self) -> tuple[int, str]:
        """Return the status and the error of the next response, or its body."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.splitlines()[1:-1])
        received = (await self._reader.readexactly(int(fields.get(b"content-length", b"0")))).decode()
        if fields.get(b"transfer-encoding") == b"chunked":
            received = (await self._reader.readuntil(b"0\r\n\r\n")).decode()
        error = json.loads(received)["error"] if received.startswith('{"error"') else received
        return int(head.split()[1]), error


@pytest.fixture(params=[True, False], ids=["fast path", "aiohttp"])
def talk(request: pytest.FixtureRequest, with_kernel: WithKernel) -> Callable[..., None]:
    """Return a function that runs a conversation with a server over one connection."""

    def run(
        conversation: Callable[[Client, Any], Awaitable[None]],
        options: HttpOptions | None = None,
        admin: AdminOptions | None = None,
    ) -> None:
        async def test(kernel: Kernel) -> None:
            def door(sock: Any) -> HttpServer:
                return HttpServer(kernel, sock, options or HttpOptions(), fast_path=request.param, admin=admin)

            async with listening(door) as port:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                await conversation(Client(reader, writer, port), kernel)
                writer.close()

        with_kernel(test)

    return run


# ---- web pages -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
def test_a_foreign_page_can_post_nothing(talk: Callable[..., None], path: str) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        for sign in (EVIL, "Sec-Fetch-Site: cross-site"):
            for _ in range(2):  # the second head is known to the fast path
                status, error = await client.call("POST", path, sign, "Content-Type: text/plain", body=BODY)
                assert status == 403
                assert "comes from a web page of another origin" in error
        assert kernel.repository.calls == []
        assert kernel.resolve("echo").statistics.inference_count == 0
        assert (await client.call("POST", INFER, body=BODY))[0] == 200, "the connection goes on"

    talk(conversation)


def test_a_page_of_the_server_and_a_program_may_post(talk: Callable[..., None]) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        own = f"Origin: http://127.0.0.1:{client.port}"
        for lines in ((), (own,), (EVIL, "Sec-Fetch-Site: same-origin")):
            assert (await client.call("POST", INFER, *lines, body=BODY))[0] == 200
            assert (await client.call("POST", "/v2/repository/models/m/load", *lines))[0] == 200

    talk(conversation)


def test_a_page_of_an_allowed_origin_may_post(talk: Callable[..., None]) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        for path in (INFER, "/v2/logging"):
            assert (await client.call("POST", path, EVIL, body=BODY))[0] == 200

    talk(conversation, HttpOptions(cors_origins=("https://evil.example",)))


def test_a_rebound_name_reads_and_changes_nothing_on_a_port_of_loopback(talk: Callable[..., None]) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        host = f"evil.example:{client.port}"
        for method, path in [*(("POST", path) for path in POSTS), ("GET", "/v2"), ("GET", "/v2/models/echo/config")]:
            lines = ("Accept-Language: en", *([f"Origin: http://{host}"] if method == "POST" else []))
            status, error = await client.call(method, path, *lines, host=host, body=BODY if method == "POST" else "")
            assert status == 403
            assert "--http-allowed-hosts=evil.example" in error
        assert kernel.repository.calls == []
        assert (await client.call("POST", INFER, host="proxy.example", body=BODY))[0] == 200
        assert (await client.call("GET", "/v2", host="proxy.example"))[0] == 200

    talk(conversation)


def test_with_listed_hosts_every_other_name_is_refused(talk: Callable[..., None]) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        for host, status in (("models.example", 200), ("MODELS.example:1", 200), ("proxy.example", 403)):
            assert (await client.call("POST", INFER, host=host, body=BODY))[0] == status
            assert (await client.call("GET", "/v2", host=host))[0] == status

    talk(conversation, HttpOptions(allowed_hosts=("models.example",)))


def test_the_restriction_of_an_api_is_named_first(talk: Callable[..., None]) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        refused = await client.call("POST", INFER, EVIL, body=BODY)
        assert refused == (403, "This API is restricted, expecting header 'k'")

    talk(conversation, HttpOptions(restricted_api=("inference:k=v",)))


def test_the_metrics_port_has_the_names_and_a_category_of_restrictions(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        options = HttpOptions(restricted_api=("metrics:X-Key=secret",), allowed_hosts=("models.example",))
        async with listening(lambda sock: MetricsServer(kernel, sock, http=options)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            client = Client(reader, writer, port)
            refused = await client.call("GET", "/metrics")
            assert refused == (403, "This API is restricted, expecting header 'X-Key'")
            assert (await client.call("GET", "/metrics", "x-key: secret"))[0] == 200
            assert (await client.call("GET", "/metrics", "x-key: secret", host="other.example"))[0] == 403
            writer.close()

    with_kernel(test)


# ---- bodies ----------------------------------------------------------------------------------

#: Requests whose bodies have neither tensors nor files, and may be read at all.
SMALL = [path for path in POSTS if "echo" not in path and not path.endswith("/unregister")] + [
    "/v2/repository/models/echo/unload",
    "/v2/models/echo/trace/setting",
]


@pytest.mark.parametrize("path", SMALL)
def test_a_large_body_that_controls_the_server_is_refused_before_it_is_received(
    talk: Callable[..., None], path: str
) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        client.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_CONTROL_BYTE_SIZE + 1}\r\n\r\n")
        assert await client.read() == (
            400,
            "request JSON size of 65537 bytes exceeds the maximum allowed input size of 65536 bytes for requests "
            "without tensors and files.",
        )

    talk(conversation)


@pytest.mark.parametrize("path", SMALL)
def test_a_body_without_announced_size_is_refused_at_the_limit(talk: Callable[..., None], path: str) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        client.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.write(f"{MAX_CONTROL_BYTE_SIZE + 1:x}\r\n{' ' * (MAX_CONTROL_BYTE_SIZE + 1)}\r\n")
        status, error = await client.read()
        assert status == 400
        assert error.startswith("request JSON size of 65537 bytes exceeds")

    talk(conversation)


def test_a_smaller_limit_of_the_operator_holds(talk: Callable[..., None]) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        status, error = await client.call("POST", "/v2/logging", body=" " * 11)
        assert status == 400
        assert error.endswith("input size of 10 bytes. Use --http-max-input-size to increase the limit.")

    talk(conversation, HttpOptions(max_input_size=10))


def test_a_load_may_bring_large_files(talk: Callable[..., None]) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        body = json.dumps({"parameters": {"config": "{}", "file:1/m": "AAAA" * 100_000}})
        assert (await client.call("POST", "/v2/repository/models/m/load", body=body))[0] == 200

    talk(conversation)


# ---- texts of clients in errors --------------------------------------------------------------

LONG = "x" * 60_000


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "IN", "shape": [1], "datatype": "FP32", "data": [1], **changes}


#: A path, lines of the head, and a body with a long text in it.
LONG_TEXTS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    (INFER, (), {"inputs": [tensor(name=LONG)]}),
    (INFER, (), {"inputs": [tensor(datatype=LONG)]}),
    (INFER, (), {"inputs": [tensor(shape=[1] * 30_000)]}),
    (INFER, (), {"inputs": [tensor(data=[LONG])]}),
    (INFER, (), {"inputs": [tensor(parameters={"shared_memory_region": LONG, "shared_memory_byte_size": 4})]}),
    (INFER, (), {"inputs": [tensor()], "outputs": [{"name": LONG}]}),
    (INFER, (), {"inputs": [tensor(), tensor()], "id": LONG}),
    (INFER, (f"Inference-Header-Content-Length: {'1' * 5000}",), {}),
    (INFER, (f"Inference-Header-Content-Length: {'é' * 2000}",), {}),
    (INFER, (f"Content-Encoding: {'x' * 5000}",), {}),
    (f"/v2/models/{'x' * 5000}/infer", (), {}),
    ("/v2/models/echo/generate", (), {LONG: 1}),
    (f"/v2/models/{'x' * 5000}/generate", (), {}),
    ("/v2/repository/models/m/load", (), {"parameters": {f"file:{LONG}": "not base64"}}),
    ("/v2/logging", (), {"log_format": LONG}),
    ("/v2/trace/setting", (), {"trace_rate": LONG}),
    (f"/v2/models/{'x' * 5000}/trace/setting", (), {}),
    ("/v2/systemsharedmemory/region/r/register", (), {"key": LONG, "offset": 0, "byte_size": 1}),
    (f"/v2/systemsharedmemory/region/{'x' * 5000}/register", (), {"key": "/k", "offset": 0, "byte_size": 1}),
)


@pytest.mark.parametrize("number", range(len(LONG_TEXTS)))
def test_an_error_repeats_little_of_a_long_text(talk: Callable[..., None], number: int) -> None:
    path, lines, body = LONG_TEXTS[number]

    async def conversation(client: Client, kernel: Any) -> None:
        status, error = await client.call("POST", path, *lines, body=json.dumps(body))
        assert status >= 400
        assert 0 < len(error.encode()) < 1100

    talk(conversation)


# ---- --admin-access --------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
def test_with_a_key_only_those_who_have_it_administer_the_server(
    talk: Callable[..., None], tmp_path: Path, path: str
) -> None:
    (tmp_path / "key").write_text("open sesame\n")

    async def conversation(client: Client, kernel: Any) -> None:
        for lines in ((), ("Admin-Key: open",)):
            found = await client.call("POST", path, *lines, body=BODY)
            assert (found == (403, "This API is restricted, expecting header 'admin-key'")) is POSTS[path]
        if POSTS[path]:
            assert kernel.repository.calls == []
        assert (await client.call("POST", path, "Admin-Key: open sesame", body=BODY))[0] != 403

    talk(conversation, admin=AdminOptions("key", f"@{tmp_path}/key"))


def test_settings_can_be_read_without_the_key(talk: Callable[..., None]) -> None:
    async def conversation(client: Client, kernel: Any) -> None:
        for path in ("/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status", "/v2/models/stats"):
            assert (await client.call("GET", path))[0] == 200

    talk(conversation, admin=AdminOptions("key", "secret"))


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("path", POSTS)
def test_with_local_access_only_clients_on_the_machine_administer_the_server(
    talk: Callable[..., None], monkeypatch: pytest.MonkeyPatch, path: str, local: bool
) -> None:
    monkeypatch.setattr("protocols.access.is_local", lambda peer: local)

    async def conversation(client: Client, kernel: Any) -> None:
        status, error = await client.call("POST", path, body=BODY)
        refused = (403, "This API is restricted to clients on the server's machine (--admin-access=local)")
        assert ((status, error) == refused) is (POSTS[path] and not local)

    talk(conversation, admin=AdminOptions("local"))


def test_every_post_of_the_server_is_in_the_table() -> None:
    tested = {post_of(path)[0]: administers for path, administers in POSTS.items()}
    for path, operations in generic_paths().items():
        if any(operation.method == "post" for operation in operations):
            handler, administers = post_of(re.sub(r"\{version\}", "1", re.sub(r"\{(?!version)\w+\}", "x", path)))
            assert tested[handler] is administers, path


def post_of(path: str) -> tuple[Any, bool]:
    """Return the handler of a POST, and whether it is for those who administer the server."""
    found = find_endpoint(path)
    assert found is not None, path
    return found[0].handlers["POST"], found[0].administers

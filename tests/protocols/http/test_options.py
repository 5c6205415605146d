"""What each option of the HTTP door changes on the wire: restrictions, header forwarding, CORS, TLS."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvloop

from kernel.errors import BadOption
from kernel.options import HttpOptions
from protocols.http.server import HttpServer
from tests.protocols.front_door_lab import listening

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from kernel.serving.kernel import Kernel
    from tests.protocols.certificates import Certificates

    Serve = Callable[[HttpOptions, Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]


REQUEST = {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}]}
INFER = "/v2/models/echo/infer"

#: One path of each kind, by category, with a method that it has.
PATHS = [
    ("health", "GET", "/v2/health/live"),
    ("health", "GET", "/v2/health/ready"),
    ("health", "GET", "/v2/models/echo/ready"),
    ("health", "GET", "/v2/models/echo/versions/1/ready"),
    ("metadata", "GET", "/v2"),
    ("metadata", "GET", "/v2/models/echo"),
    ("metadata", "GET", "/v2/models/echo/versions/1"),
    ("inference", "POST", INFER),
    ("inference", "POST", "/v2/models/echo/generate"),
    ("inference", "POST", "/v2/models/echo/generate_stream"),
    ("shared-memory", "GET", "/v2/systemsharedmemory/status"),
    ("shared-memory", "POST", "/v2/systemsharedmemory/region/r/register"),
    ("shared-memory", "POST", "/v2/cudasharedmemory/unregister"),
    ("model-config", "GET", "/v2/models/echo/config"),
    ("model-repository", "POST", "/v2/repository/index"),
    ("model-repository", "POST", "/v2/repository/models/echo/load"),
    ("model-repository", "POST", "/v2/repository/r/models/echo/unload"),
    ("statistics", "GET", "/v2/models/stats"),
    ("statistics", "GET", "/v2/models/echo/stats"),
    ("trace", "GET", "/v2/trace/setting"),
    ("trace", "POST", "/v2/models/echo/trace/setting"),
    ("logging", "POST", "/v2/logging"),
]


async def fetch(session: aiohttp.ClientSession, method: str, path: str, **more: Any) -> tuple[int, str, bytes]:
    async with session.request(method, path, **more) as response:
        return response.status, response.headers["Content-Type"], await response.read()


# ---- restricted APIs ------------------------------------------------------------------------


@pytest.mark.parametrize(("category", "method", "path"), PATHS)
def test_a_category_is_closed_to_those_without_the_header(serve: Serve, category: str, method: str, path: str) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        refused = (403, "text/plain", b"""{"error":"This API is restricted, expecting header 'X-Key'"}""")
        for used in (method, "PUT", "HEAD" if method == "GET" else "GET"):
            for headers in ({}, {"X-Key": "open"}, {"X-Key": "open sesame!"}):
                status, content_type, body = await fetch(session, used, path, headers=headers)
                assert (status, content_type, body or refused[2]) == refused
        status, _, _ = await fetch(session, method, path, headers={"x-key": "open sesame"}, json=REQUEST)
        assert status != 403
        assert (await fetch(session, "GET", "/v2/nowhere"))[0] == 404

    serve(HttpOptions(restricted_api=(f"{category}:X-Key=open sesame",)), test)


def test_other_categories_stay_open(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        closed = [path for _, method, path in PATHS if (await fetch(session, method, path, json=REQUEST))[0] == 403]
        assert closed == [path for category, _, path in PATHS if category in ("trace", "logging")]

    serve(HttpOptions(restricted_api=("trace,logging:a=b",)), test)


def test_a_restriction_covers_every_spelling_of_a_path(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        url = session._base_url
        assert url is not None
        for target in (
            "/v2",
            "/v2?x",
            f"http://{url.host}/v2",
            "https://elsewhere/v2?y",
            "/V2",
            "//v2",
            "/%76%32",
            "/v2/",
        ):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            status = int((await reader.read()).split()[1])
            writer.close()
            assert status in (403, 404), target

    serve(HttpOptions(restricted_api=("metadata:a=b",)), test)


# ---- header forwarding ----------------------------------------------------------------------


def test_matching_headers_become_parameters_over_those_of_the_body(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        headers = {"X-User": "ann", "Other": "1"}
        body = {**REQUEST, "parameters": {"X-User": "bob", "n": 5}}
        status, _, received = await fetch(session, "POST", INFER, json=body, headers=headers)
        assert (status, json.loads(received)["parameters"]) == (200, {"X-User": "ann", "n": 5})
        headers["Inference-Header-Content-Length"] = "0"
        status, _, received = await fetch(session, "POST", INFER, data=b"\0\0\0\0", headers=headers)
        assert (status, json.loads(received[:-4])["parameters"]) == (200, {"X-User": "ann"})

    serve(HttpOptions(header_forward_pattern="^x-"), test)


def test_reserved_headers_are_refused_where_they_match(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        text = b"""{"error":"Header 'Timeout' is reserved for Triton usage and cannot be forwarded."}"""
        found = await fetch(session, "POST", INFER, json=REQUEST, headers={"Timeout": "1"})
        assert found == (400, "application/json", text)

    serve(HttpOptions(header_forward_pattern="timeout"), test)


def test_generate_forwards_no_headers(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        for endpoint in ("generate", "generate_stream"):
            path = f"/v2/models/echo/{endpoint}"
            _, _, body = await fetch(session, "POST", path, json={"IN": 1}, headers={"X-User": "ann", "timeout": "1"})
            assert json.loads(body.removeprefix(b"data: ")) == {
                "OUT_IN": 1.0,
                "model_name": "echo",
                "model_version": "1",
            }

    serve(HttpOptions(header_forward_pattern=".*"), test)


# ---- CORS -----------------------------------------------------------------------------------


def test_without_the_option_browsers_get_no_headers(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        for method, status in (("GET", 200), ("OPTIONS", 405)):
            async with session.request(method, "/v2", headers=asks) as response:
                assert response.status == status
                assert not [name for name in response.headers if name.startswith(("Access-Control", "Vary"))]

    serve(HttpOptions(), test)


def test_every_response_has_the_headers_of_cors(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        calls: tuple[tuple[str, str, Any, int], ...] = (
            ("GET", "/v2", None, 200),
            ("GET", "/nowhere", None, 404),
            ("POST", INFER, REQUEST, 200),
            ("POST", INFER, {}, 500),
            ("POST", "/v2/models/echo/generate", {"IN": 1}, 200),
            ("POST", "/v2/models/echo/generate_stream", {"IN": 1}, 200),
            ("GET", "/v2/logging", None, 403),
        )
        for method, path, body, status in calls:
            async with session.request(method, path, json=body, headers={"Origin": "https://a.example"}) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
                assert response.headers["Access-Control-Expose-Headers"] == "Inference-Header-Content-Length"
                assert response.headers["Vary"] == "Origin"
            async with session.request(method, path, json=body) as response:
                assert response.status == status
                assert "Access-Control-Allow-Origin" not in response.headers

    serve(HttpOptions(cors_origins=("https://a.example",), restricted_api=("logging:a=b",)), test)


def test_a_preflight_is_admitted_even_where_the_call_is_restricted(serve: Serve) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        asks = {
            "Origin": "https://a.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type,a",
        }
        async with session.options(INFER, headers=asks) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "*"
            assert response.headers["Access-Control-Allow-Methods"] == "POST"
            assert response.headers["Access-Control-Allow-Headers"] == "content-type,a"
        async with session.options("/nowhere", headers=asks) as response:
            assert response.status == 404
        async with session.options(INFER, headers={"Origin": "https://a.example"}) as response:
            assert response.status == 403

    serve(HttpOptions(cors_origins=("*",), restricted_api=("inference:a=b",)), test)


# ---- TLS ------------------------------------------------------------------------------------


@pytest.mark.slow_loop("large JSON is decoded and encoded on the event loop")
@pytest.mark.parametrize("fast_path", [True, False], ids=["fast path", "aiohttp"])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("mutual", [False, True], ids=["server", "mutual"])
def test_everything_is_served_over_tls(
    certificates: Certificates,
    with_kernel: Callable[..., None],
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    mutual: bool,
    fast_path: bool,
) -> None:
    async def test(kernel: Kernel) -> None:
        options = HttpOptions(tls=certificates.options(mutual=mutual))
        context = certificates.client_context(with_certificate=mutual)
        async with (
            listening(lambda sock: HttpServer(kernel, sock, options, fast_path=fast_path)) as port,
            aiohttp.ClientSession(
                f"https://127.0.0.1:{port}", connector=aiohttp.TCPConnector(ssl=context, limit=1)
            ) as session,
        ):
            large = {"inputs": [{"name": "IN", "shape": [200_000], "datatype": "FP32", "data": [0.5] * 200_000}]}
            for _ in range(2):
                assert (await fetch(session, "GET", "/v2/health/live"))[0] == 200
                status, _, body = await fetch(session, "POST", INFER, json=REQUEST)
                assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [1.0])
                status, _, body = await fetch(session, "POST", INFER, json=large)
                assert (status, len(json.loads(body)["outputs"][0]["data"])) == (200, 200_000)
                # Chunked: the fast path gives the connection to aiohttp.
                status, _, _ = await fetch(session, "POST", INFER, data=_parts(json.dumps(REQUEST).encode()))
                assert status == 200
                status, _, body = await fetch(session, "POST", "/v2/models/repeat/generate_stream", json={"IN": [1, 2]})
                assert (status, body.count(b"data: ")) == (200, 2)

    with_kernel(test, new_loop)


async def _parts(body: bytes) -> Any:
    yield body[:5]
    yield body[5:]


def test_clients_without_a_certificate_or_without_tls_get_no_response(
    certificates: Certificates, with_kernel: Callable[[Callable[[Kernel], Coroutine[Any, Any, None]]], None]
) -> None:
    async def test(kernel: Kernel) -> None:
        options = HttpOptions(tls=certificates.options(mutual=True))
        async with listening(lambda sock: HttpServer(kernel, sock, options)) as port:
            connector = aiohttp.TCPConnector(ssl=certificates.client_context())
            async with aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=connector) as session:
                with pytest.raises(aiohttp.ClientError):
                    await session.get("/v2")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP" not in await reader.read()
            writer.close()

    with_kernel(test)


# ---- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        HttpOptions(restricted_api=("nothing:a=b",)),
        HttpOptions(header_forward_pattern="("),
        HttpOptions(cors_origins=("example.com",)),
    ],
)
def test_bad_options_are_refused_when_the_door_is_made(
    with_kernel: Callable[[Callable[[Kernel], Coroutine[Any, Any, None]]], None], options: HttpOptions
) -> None:
    async def test(kernel: Kernel) -> None:
        with socket.socket() as sock, pytest.raises(BadOption):
            HttpServer(kernel, sock, options)

    with_kernel(test)

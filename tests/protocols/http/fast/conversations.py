"""Conversations over a raw socket with a server that has a fast path, and with one that has none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from typing import TYPE_CHECKING

import msgspec

from kernel.options import HttpOptions
from protocols.http.server import HttpServer
from tests.protocols.front_door_lab import listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kernel.serving.kernel import Kernel

#: If the server took another end for the body before it, this request would get another response.
FOLLOWER = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HIDDEN = b"GET /v2/models/hidden HTTP/1.1\r\nHost: x\r\n\r\n"

BODY = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}).encode()
BINARY_HEADER = json.dumps(
    {
        "id": "7",
        "parameters": {"binary_data_output": True},
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}],
    }
).encode()


def post(body: bytes, *headers: str, model: str = "echo", length: str | None = "", version: str = "1.1") -> bytes:
    """Return a request. `length` is the Content-Length in place of the true one; None leaves it out."""
    lines = [f"POST /v2/models/{model}/infer HTTP/{version}", "Host: x", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*parts: bytes, extension: bytes = b"") -> bytes:
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in (*parts, b""))


def announced(length: str, body: bytes = BODY) -> bytes:
    return post(body, f"Inference-Header-Content-Length: {length}")


CONVERSATIONS = {
    "plain": post(BODY),
    "twice": post(BODY) * 2,
    "many": post(BODY) * 70,
    "empty body": post(b"", length="0"),
    "no length": post(b"", length=None),
    "raw": post(bytes(8), "Inference-Header-Content-Length: 0", model="batched"),
    "raw of the wrong size": post(bytes(7), "Inference-Header-Content-Length: 0", model="batched"),
    "binary": post(BINARY_HEADER + bytes(8), f"Inference-Header-Content-Length: {len(BINARY_HEADER)}"),
    "gzip response": post(BODY, "Accept-Encoding: gzip"),
    "deflate binary response": post(
        BINARY_HEADER + bytes(8), f"Inference-Header-Content-Length: {len(BINARY_HEADER)}", "Accept-Encoding: deflate"
    ),
    "broken gzip": post(b"no gzip", "Content-Encoding: gzip"),
    "unknown encoding": post(BODY, "Content-Encoding: br"),
    "unknown model": post(BODY, model="nothing"),
    "unknown version": post(BODY, model="echo/versions/9"),
    "version": post(BODY, model="echo/versions/1"),
    "decoupled": post(BODY, model="repeat"),
    "broken json": post(b'{"inputs":[}'),
    "unready": post(BODY, model="unloaded"),
    "names": post(BODY, model="a%2fb") + post(BODY, model="..") + post(BODY, model="x/versions/y"),
    "others between": HIDDEN + post(BODY) + HIDDEN + HIDDEN + post(BODY) + post(BODY, model="nothing"),
    "body of another": b"POST /v2/logging HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}" + post(BODY),
    "head": b"HEAD /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n" + post(BODY),
    "chunked": post(chunked(BODY[:9], BODY[9:]), "Transfer-Encoding: chunked", length=None) + post(BODY),
    "broken chunks": post(b"zz\r\n", "Transfer-Encoding: chunked", length=None),
    "continue": post(BODY, "Expect: 100-continue"),
    "close": post(BODY, "Connection: close"),
    "close in other letters": post(BODY, "connection: CLOSE"),
    "close an unknown model": post(BODY, "Connection: close", model="nothing"),
    "close with an empty body": post(b"", "Connection: close", length="0"),
    "close broken json": post(b'{"inputs":[}', "Connection: close"),
    "close a binary request": post(
        BINARY_HEADER + bytes(8), f"Inference-Header-Content-Length: {len(BINARY_HEADER)}", "Connection: Close"
    ),
    "1.0": post(BODY, version="1.0"),
    "1.0 kept": post(BODY, "Connection: keep-alive", version="1.0"),
    "1.0 chunked": post(chunked(BODY), "Transfer-Encoding: chunked", length=None, version="1.0"),
    "2.0": post(BODY, version="2.0"),
    "full url": post(BODY).replace(b"/v2", b"http://anywhere/v2", 1),
    "line feeds": post(BODY).replace(b"\r\n", b"\n"),
    "folded": post(BODY, "X: a", " b"),
    "space before colon": post(BODY, "Transfer-Encoding : chunked"),
    "nul": post(BODY, "X: a\0b"),
    "bare return": post(BODY, "X: a\rb"),
    "no host": post(BODY).replace(b"Host: x\r\n", b""),
    "two hosts": post(BODY, "Host: y"),
    "long line": post(BODY, "X: " + "y" * 9000),
    "many headers": post(BODY, *(f"X{number}: y" for number in range(130))),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    "h2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    **{
        f"length {length!r}": post(HIDDEN, length=length)
        for length in ("+5", "-5", "0x5", "5,5", "5 5", "5_0", "1e1", "\u0665", " ", "9" * 30)
    },
    "two lengths": post(HIDDEN, "Content-Length: 5"),
    "two equal lengths": post(HIDDEN, f"Content-Length: {len(HIDDEN)}"),
    "length and chunks": post(chunked(BODY) + HIDDEN, "Transfer-Encoding: chunked", length="5"),
    "chunks twice": post(chunked(BODY), "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", length=None),
    "chunked, chunked": post(chunked(BODY), "Transfer-Encoding: chunked, chunked", length=None),
    "xchunked": post(chunked(BODY), "Transfer-Encoding: xchunked", length=None),
    "identity transfer": post(BODY, "Transfer-Encoding: identity"),
    **{
        f"announced {length!r}": announced(length) + announced(length, BODY + HIDDEN)
        for length in ("0", "1", str(len(BODY)), "999", "1000000000", "-1", "+2", "2abc", "", "2, 2", "\u0662")
    },
}


class Server(msgspec.Struct, frozen=True):
    """How a server is made."""

    fast_path: bool
    options: HttpOptions = HttpOptions(max_input_size=1 << 20)
    log_access: bool = False


class Observed(msgspec.Struct):
    """What clients read, and what stands in the access log, without times and ports."""

    responses: list[bytes]
    log_lines: list[str]


@contextlib.contextmanager
def access_log_lines() -> Iterator[list[str]]:
    """Collect the lines of the access log while the block runs."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = re.sub(r"^127\.0\.0\.1:\d+ ", "", record.getMessage())
            lines.append(re.sub(r" ms=[0-9.]+", "", line))

    logger, collector = logging.getLogger("access"), Collector()
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)


@contextlib.asynccontextmanager
async def connected(kernel: Kernel, server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a new server; what does not come is not waited for without end."""
    async with listening(
        lambda sock: HttpServer(kernel, sock, server.options, fast_path=server.fast_path, log_access=server.log_access)
    ) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(60):
                yield reader, writer
        finally:
            writer.close()


async def converse(kernel: Kernel, server: Server, sent: bytes) -> Observed:
    """Send `sent` at once; the response is all that comes until the server closes the connection."""
    with access_log_lines() as lines:
        async with connected(kernel, server) as (reader, writer):
            writer.write(sent)
            responses = await reader.read()
    return Observed([_without_date(responses)], lines)


async def ask(kernel: Kernel, server: Server, requests: list[tuple[bytes, bytes]], *, cut: bool) -> Observed:
    """Send each of `requests` when the one before has its response; `cut` sends head and body apart."""
    responses = []
    with access_log_lines() as lines:
        async with connected(kernel, server) as (reader, writer):
            for head, body in requests:
                writer.write(head)
                if cut:
                    await writer.drain()
                writer.write(body)
                response = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"\nContent-Length: (\d+)", response)
                assert length is not None
                responses.append(_without_date(response) + await reader.readexactly(int(length[1])))
    return Observed(responses, lines)


def _without_date(response: bytes) -> bytes:
    return re.sub(rb"Date: [^\r]*", b"Date: now", response)


def binary(id: str, count: int, *headers: str) -> tuple[bytes, bytes]:
    """Return head and body of a request of `count` elements, all of it binary data."""
    parameters = {"binary_data_size": 4 * count}
    tensor = {"name": "IN", "datatype": "FP32", "shape": [count], "parameters": parameters}
    document = {"id": id, "parameters": {"binary_data_output": True}, "inputs": [tensor]}
    header = json.dumps(document).encode()
    body = header + bytes(range(4)) * count
    sent = post(body, f"Inference-Header-Content-Length: {len(header)}", *headers)
    return sent[: -len(body)], body

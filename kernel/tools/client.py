"""HTTP to a running server, for commands: `infer` and `ready`. Each error is one line for the user.

It uses only the standard library, and is not a client library.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

from kernel.errors import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: The header of Triton's binary data extension: how many bytes of a body are JSON.
_JSON_BYTE_SIZE = "Inference-Header-Content-Length"

_TIMEOUT_S = 300
_PROBE_TIMEOUT_S = 2


class ClientError(BadOption):
    """The request failed. The message is for the user, in one line but for what models say."""


class GrpcPort(ClientError):
    """The port does not respond to HTTP/1.1, but speaks HTTP/2."""


def base_url(text: str) -> str:
    """Return the URL for `text`: a URL, or HOST:PORT as in Triton's clients. Raises `ClientError`."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ClientError(f"'{text}' is not an address of a server: give HOST:PORT, or a URL with http:// or https://")
    return url


def model_path(name: str, version: str = "") -> str:
    """Return the path of a model, or of one version of it, below the address of a server."""
    path = f"/v2/models/{urllib.parse.quote(name, safe='')}"
    return f"{path}/versions/{urllib.parse.quote(version, safe='')}" if version else path


def call(url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
    """Return the JSON of a response: to a GET, or to a POST where there is a body. Raises `ClientError`.

    The response to a POST may have no body; then None is returned.
    """
    data = None if body is None else json.dumps(body).encode()
    with _open(url, data, headers) as response, _explained(url):
        text = response.read()
        return None if body is not None and not text else json.loads(text)


def download(url: str) -> bytes:
    """Return the body of a response to a GET. Raises `ClientError`."""
    with _open(url, None) as response, _explained(url):
        body: bytes = response.read()
        return body


def infer(url: str, request: dict[str, Any], binary: bytes) -> tuple[dict[str, Any], bytes]:
    """Send the JSON of a request with the raw bytes of its inputs; return the same of the response.

    Raises `ClientError`.
    """
    head = json.dumps(request).encode()
    with _open(url, head + binary, {_JSON_BYTE_SIZE: str(len(head))}) as response, _explained(url):
        body = response.read()
        end = int(response.headers.get(_JSON_BYTE_SIZE, len(body)))
        return json.loads(body[:end]), body[end:]


def stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a response. Raises `ClientError`."""
    with _open(url, json.dumps(body).encode()) as response, _explained(url):
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ClientError(str(event["error"]))
                yield event


def _open(url: str, data: bytes | None, headers: Mapping[str, str] | None = None) -> Any:
    request = urllib.request.Request(url, data=data, headers=dict(headers or {}))
    with _explained(url):
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise ClientError(_refusal(error, url)) from None


def _refusal(error: urllib.error.HTTPError, url: str) -> str:
    """Return the text for a response with an error: the server's, or that it is no server of Triton's protocol."""
    with error:
        text = error.read().decode("utf-8", "replace")
    try:
        return f"the server returned {error.code}: {json.loads(text)['error']}"
    except (ValueError, KeyError, TypeError):
        return (
            f"{_server(url)} is not the HTTP port of an inference server: it returned {error.code} {error.reason}. "
            f"{_OTHER_PORT}"
        )


_OTHER_PORT = "Give the address of the HTTP port with --url; the server prints it when it starts"


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Raise every error of the connection in this block as `ClientError`, with one line that says what to do."""
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _explanation(error, url) from None


def _explanation(error: Exception, url: str) -> ClientError:
    """Return the error with the line about an error of the connection."""
    server, reason = _server(url), getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return ClientError(f"{server} has not responded within {_TIMEOUT_S} s")
    if isinstance(reason, http.client.InvalidURL):
        return ClientError(f"'{server}' is not an address: {reason}. {_OTHER_PORT}, as HOST:PORT")
    if isinstance(reason, json.JSONDecodeError):
        return ClientError(
            f"{server} is not the HTTP port of an inference server: its response is not JSON. {_OTHER_PORT}"
        )
    if isinstance(reason, (http.client.HTTPException, ConnectionResetError)):
        if speaks_http2(server):
            return GrpcPort(f"{server} is a gRPC port: it does not respond to HTTP/1.1. {_OTHER_PORT}")
        return ClientError(
            f"{server} is not the HTTP port of an inference server: it does not respond to HTTP/1.1. {_OTHER_PORT}"
        )
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
    return ClientError(
        f"no server responds at {server}: {text}. Start one with 'naiad run', or give the address of another with --url"
    )


#: What a client of HTTP/2 sends first: the preface, and an empty SETTINGS frame (RFC 9113, 3.4).
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
_SETTINGS = 4
_FRAME_TYPE = 3


def speaks_http2(server: str) -> bool:
    """Whether the server greets a client of HTTP/2 with a SETTINGS frame."""
    parts = urllib.parse.urlsplit(server)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), _PROBE_TIMEOUT_S) as connection:
            connection.sendall(_HTTP2_GREETING)
            head = connection.recv(9)
    except OSError:
        return False
    return len(head) > _FRAME_TYPE and head[_FRAME_TYPE] == _SETTINGS


def _server(url: str) -> str:
    return url.split("/v2/")[0]

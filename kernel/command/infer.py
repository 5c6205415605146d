"""`naiad infer`: sends one request to a running server over HTTP, and prints the response.

It uses only the standard library, and NumPy to read a NumPy file. It is not a client library.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The number of best classes shown for an output with labels, without --classes.
DEFAULT_CLASSES = 3

#: The most values of an output that are shown.
SHOWN_VALUES = 32

_TIMEOUT_S = 300
_PROBE_TIMEOUT_S = 2


class ClientError(Exception):
    """The request failed. The message is one line for the user."""


def infer_and_print(url: str, model: str, inputs: list[str], classes: int) -> int:
    """Send a request with `inputs` (`NAME=VALUE`) and print the outputs. Returns the exit code."""
    try:
        _infer_and_print(base_url(url), model, inputs, classes)
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def base_url(text: str) -> str:
    """Return the URL for `text`: a URL, or HOST:PORT as in Triton's clients. Raises `ClientError`."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ClientError(f"'{text}' is not an address of a server: give HOST:PORT, or a URL with http:// or https://")
    return url


def _infer_and_print(url: str, model: str, inputs: list[str], classes: int) -> None:
    name, _, version = model.partition(":")
    path = f"{url}/v2/models/{urllib.parse.quote(name)}" + (f"/versions/{version}" if version else "")
    metadata = _call(path)
    config = _call(f"{path}/config")
    tensors = build_inputs(metadata, dict(_split(given) for given in inputs))
    if config.get("model_transaction_policy", {}).get("decoupled"):
        for event in _stream(f"{path}/generate_stream", {t["name"]: t["data"] for t in tensors}):
            _print_line(", ".join(f"{k} = {v}" for k, v in event.items() if k not in ("model_name", "model_version")))
        return
    response = _call(f"{path}/infer", {"inputs": tensors, "outputs": build_outputs(metadata, config, classes)})
    for line in format_outputs(response):
        _print_line(line)


def _split(given: str) -> tuple[str, Any]:
    name, equals, text = given.partition("=")
    if not equals:
        raise ClientError(f"'{given}' is not of the form NAME=VALUE or NAME=@FILE.npy")
    return name, read_value(text)


def read_value(text: str) -> Any:
    """Return the value of a command-line text: the array of a NumPy file as lists, a JSON value, or the text."""
    if text.startswith("@"):
        return _read_npy(text[1:])
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_npy(path: str) -> Any:
    import numpy as np  # imported late: most calls have no NumPy file

    try:
        return np.load(path, allow_pickle=False).tolist()
    except (OSError, ValueError) as error:
        raise ClientError(f"cannot read '{path}' as a NumPy file: {error}") from None


def build_inputs(metadata: dict[str, Any], values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs of the request. Raises `ClientError`, whose message lists the model's inputs."""
    known = {tensor["name"]: tensor for tensor in metadata["inputs"]}
    takes = ", ".join(f"{t['name']} ({t['datatype']} {t['shape']})" for t in metadata["inputs"])
    for name in values:
        if name not in known:
            raise ClientError(f"model '{metadata['name']}' has no input '{name}'; it takes {takes}")
    if not values and known:
        raise ClientError(f"model '{metadata['name']}' takes {takes}: give each as NAME=VALUE or NAME=@FILE.npy")
    tensors = []
    for name, value in values.items():
        flat = list(_flat(value))
        shape = choose_shape(known[name]["shape"], value, len(flat))
        if shape is None:
            raise ClientError(
                f"input '{name}' has shape {known[name]['shape']}, where -1 is any size; the value given has "
                f"shape {_shape(value)}"
            )
        tensors.append({"name": name, "datatype": known[name]["datatype"], "shape": shape, "data": flat})
    return tensors


def choose_shape(dims: list[int], value: Any, count: int) -> list[int] | None:
    """Return the shape for the `count` elements of `value`: its own shape if that matches `dims`, else `dims` with the
    variable sizes filled in; None if the elements do not fit."""
    own = _shape(value)
    if len(own) == len(dims) and all(d in (-1, s) for d, s in zip(dims, own, strict=True)):
        return own
    if len(own) == len(dims) - 1 and all(d in (-1, s) for d, s in zip(dims[1:], own, strict=True)):
        return [1, *own]
    fixed = math.prod(d for d in dims if d != -1)
    variable = [index for index, d in enumerate(dims) if d == -1]
    if fixed == 0 or count % fixed or (not variable and count != fixed):
        return None
    # The last variable dimension gets the remaining factor and the others get 1, as in /generate.
    return [count // fixed if index in variable[-1:] else max(d, 1) for index, d in enumerate(dims)]


def _shape(value: Any) -> list[int]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for element in value:
            yield from _flat(element)
    else:
        yield value


def build_outputs(metadata: dict[str, Any], config: dict[str, Any], classes: int) -> list[dict[str, Any]]:
    """Request every output; request the best classes if the output has labels or `classes` is not 0."""
    labelled = {output["name"] for output in config.get("output", []) if output.get("label_filename")}
    outputs = []
    for tensor in metadata["outputs"]:
        output: dict[str, Any] = {"name": tensor["name"]}
        if classes or tensor["name"] in labelled:
            output["parameters"] = {"classification": classes or DEFAULT_CLASSES}
        outputs.append(output)
    return outputs


def format_outputs(response: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that show the outputs of a response."""
    for output in response["outputs"]:
        shape = "x".join(map(str, output["shape"])) or "scalar"
        yield f"{output['name']}  {output['datatype']} {shape}"
        data = output["data"]
        if output["datatype"] == "BYTES":
            for element in data[:SHOWN_VALUES]:
                yield "  " + _classes_line(element)
        else:
            yield "  " + ", ".join(_number(value) for value in data[:SHOWN_VALUES])
        if len(data) > SHOWN_VALUES:
            yield f"  … and {len(data) - SHOWN_VALUES} more"


def _classes_line(element: str) -> str:
    """Format `0.981234:7:seven` as a class and its score; return any other text unchanged."""
    score, _, rest = element.partition(":")
    index, _, label = rest.partition(":")
    try:
        value = float(score)
    except ValueError:
        return element
    if not index.isdigit():
        return element
    return f"{label or index:<20} {value:g}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _call(url: str, body: dict[str, Any] | None = None) -> Any:
    with _open(url, body) as response, _explained(url):
        return json.loads(response.read())


def _stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a response."""
    with _open(url, body) as response, _explained(url):
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ClientError(str(event["error"]))
                yield event


def _open(url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with _explained(url):
        try:
            return urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=_TIMEOUT_S)
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
        raise ClientError(_explanation(error, url)) from None


def _explanation(error: Exception, url: str) -> str:
    """Return the line about an error of the connection."""
    server, reason = _server(url), getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"{server} has not responded within {_TIMEOUT_S} s"
    if isinstance(reason, http.client.InvalidURL):
        return f"'{server}' is not an address: {reason}. {_OTHER_PORT}, as HOST:PORT"
    if isinstance(reason, json.JSONDecodeError):
        return f"{server} is not the HTTP port of an inference server: its response is not JSON. {_OTHER_PORT}"
    if isinstance(reason, (http.client.HTTPException, ConnectionResetError)):
        kind = "a gRPC port" if speaks_http2(server) else "not the HTTP port of an inference server"
        return f"{server} is {kind}: it does not respond to HTTP/1.1. {_OTHER_PORT}"
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
    return (
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


def _print_line(line: str) -> None:
    print(line, flush=True)

"""A server without memory for a request says whether to try again, over real sockets and by every path of a body."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING

import pytest

from bench.heavy.command import FLAGS
from bench.models import write_echoes
from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY_BYTE_SIZE = 4 << 20


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with memory for half of a body."""
    models = tmp_path_factory.mktemp("models")
    write_echoes(models, builtin=True)
    with ServerProcess(models, *FLAGS, f"--memory-byte-size={BODY_BYTE_SIZE // 2}") as server:
        yield server


def header(binary_data_size: int) -> bytes:
    parameters = {"binary_data_size": binary_data_size}
    tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [binary_data_size], "parameters": parameters}
    return json.dumps({"inputs": [tensor]}).encode()


BINARY = header(BODY_BYTE_SIZE) + bytes(BODY_BYTE_SIZE)
BINARY_LENGTH = {"Inference-Header-Content-Length": str(len(header(BODY_BYTE_SIZE)))}
LONG_JSON = (
    b'{"inputs":[{"name":"INPUT0","datatype":"UINT8","shape":[1],"data":[' + b"1," * (BODY_BYTE_SIZE // 2) + b"1]}]}"
)


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "chunked"])
@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v2/models/uint8/infer", BINARY, BINARY_LENGTH),
        ("/v2/models/uint8/infer", LONG_JSON, {}),
        ("/v2/models/uint8/generate", LONG_JSON, {}),
        ("/v2/repository/models/spare/load", LONG_JSON, {}),
    ],
    ids=["binary", "JSON", "generate", "load"],
)
def test_a_request_for_which_there_is_no_memory_is_told_whether_to_try_again(
    small_server: ServerProcess, path: str, body: bytes, headers: dict[str, str], chunked: bool
) -> None:
    connection = http.client.HTTPConnection(small_server.url, timeout=60)
    try:
        sent = iter([body[:100_000], body[100_000:]]) if chunked else body
        connection.request("POST", path, sent, headers, encode_chunked=chunked)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    assert response.status == 503
    if chunked:  # how long it will be is not known
        assert (response.headers["Retry-After"], b"no memory left" in text) == ("1", True), text
    else:
        assert (response.headers["Retry-After"], b"--memory-byte-size=" in text) == (None, True), text

"""The servers that `naiad infer` asks: addresses of gRPC, and what a stream over HTTP cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from kernel.tools.client import ClientError
from kernel.tools.infer import check_for_json, grpc_beside, grpc_server


def metadata(datatype: str) -> dict[str, Any]:
    return {"name": "m", "inputs": [], "outputs": [{"name": "OUT", "datatype": datatype, "shape": [1]}]}


@pytest.mark.parametrize("url", ["grpc://host", "grpc://:8001", "grpcs://host:x", "grpc://host:70000"])
def test_a_grpc_address_has_a_host_and_a_port(url: str) -> None:
    with pytest.raises(ClientError, match=f"'{url}' is not an address of a server: "):
        grpc_server(url, "m", "")


@pytest.mark.parametrize("url", ["https://host:8000", "http://host:9000", "http://host", "http://host:8000/path"])
def test_grpc_is_looked_for_only_beside_the_usual_http_port(url: str) -> None:
    assert grpc_beside(url) is None


def test_over_http_streams_have_neither_half_floats_nor_classes() -> None:
    check_for_json(metadata("FP32"), 0)
    for datatype in ("FP16", "BF16"):
        with pytest.raises(ClientError, match=f"output 'OUT' is {datatype}, .* gRPC port: --url HOST:PORT"):
            check_for_json(metadata(datatype), 0)
    with pytest.raises(ClientError, match=r"--classes: .* gRPC port: --url HOST:PORT"):
        check_for_json(metadata("FP32"), 1)

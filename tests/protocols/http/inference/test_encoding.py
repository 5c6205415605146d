"""Responses in JSON and binary, as clients read them."""

from __future__ import annotations

import gzip
import json
import struct
from typing import Any

import tritonclient.http as client

from kernel.serving.response import Response
from protocols.http.inference.decoding import OutputFormat
from protocols.http.inference.encoding import encode_infer
from shm.tensor import ClientSpan, Tensor


def response(*outputs: Tensor, **more: Any) -> Response:
    return Response("m", "3", more.pop("id", ""), outputs=list(outputs), **more)


FLOATS = Tensor("X", "FP32", [2], struct.pack("<2f", 1, 0.5))


def test_a_response_in_json_has_tritons_order_and_no_spaces() -> None:
    encoded = encode_infer(response(FLOATS, id="42", parameters={"p": 1}), OutputFormat())
    assert encoded.join() == (
        b'{"id":"42","model_name":"m","model_version":"3","parameters":{"p":1},'
        b'"outputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[1.0,0.5]}]}'
    )
    assert not encoded.has_binary


def test_binary_outputs_follow_the_header_in_their_order() -> None:
    form = OutputFormat(binary=True)
    form.named["J"] = False
    encoded = encode_infer(
        response(FLOATS, Tensor("J", "UINT8", [1], memoryview(b"\x07")), Tensor("N", "FP32", [0], b""), FLOATS),
        form,
    )
    assert encoded.header == (
        b'{"model_name":"m","model_version":"3","outputs":['
        b'{"name":"X","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}},'
        b'{"name":"J","datatype":"UINT8","shape":[1],"data":[7]},'
        b'{"name":"N","datatype":"FP32","shape":[0],"parameters":{"binary_data_size":0}},'
        b'{"name":"X","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}}]}'
    )
    assert encoded.join() == encoded.header + bytes(FLOATS.data or b"") * 2
    assert encoded.has_binary


def test_an_empty_binary_output_is_no_binary_data() -> None:
    encoded = encode_infer(response(Tensor("N", "FP32", [0], b"")), OutputFormat(binary=True))
    assert not encoded.has_binary


def test_an_output_in_shared_memory_has_neither_data_nor_parameters() -> None:
    output = Tensor("X", "FP32", [2], client_span=ClientSpan("r", 8))
    encoded = encode_infer(response(output), OutputFormat(binary=True))
    assert json.loads(encoded.join())["outputs"] == [{"name": "X", "datatype": "FP32", "shape": [2]}]


def test_the_python_client_reads_what_was_encoded() -> None:
    form = OutputFormat(binary=True)
    form.named["J"] = False
    encoded = encode_infer(response(FLOATS, Tensor("J", "INT32", [1, 2], struct.pack("<2i", 3, -4))), form)
    body = encoded.join()
    for encoding, content in ((None, body), ("gzip", gzip.compress(body))):
        result = client.InferenceServerClient.parse_response_body(
            content, header_length=len(encoded.header), content_encoding=encoding
        )
        assert result.as_numpy("X").tolist() == [1.0, 0.5]
        assert result.as_numpy("J").tolist() == [[3, -4]]

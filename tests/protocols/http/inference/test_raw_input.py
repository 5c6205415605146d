from __future__ import annotations

import struct

import pytest

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import InvalidArgument
from protocols.http.inference.raw_input import decode_raw

PREFIX = "[request id: <id_unknown>] "


def spec(*inputs: tuple[str, tuple[int, ...]], max_batch_size: int = 0) -> ModelSpec:
    tensors = {f"IN{n}": TensorSpec(f"IN{n}", datatype, dims, dims) for n, (datatype, dims) in enumerate(inputs)}
    return ModelSpec("m", "", "fake", max_batch_size, tensors, {})


def test_the_variable_dimension_follows_from_the_size() -> None:
    tensor = decode_raw(struct.pack("<6f", *range(6)), spec(("FP32", (-1, 2)), max_batch_size=8))
    assert (tensor.name, tensor.datatype, tensor.shape) == ("IN0", "FP32", [1, 3, 2])
    assert tensor.byte_size == 24


def test_an_empty_body_is_an_empty_tensor() -> None:
    assert decode_raw(b"", spec(("INT32", (-1,)))).shape == [0]


def test_a_text_becomes_the_only_element() -> None:
    tensor = decode_raw(b"ok", spec(("BYTES", (1,)), max_batch_size=4))
    assert (tensor.shape, tensor.data) == ([1, 1], b"\x02\x00\x00\x00ok")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            spec(("FP32", (1,)), ("FP32", (1,))),
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model configuration",
        ),
        (
            spec(("FP32", (-1, -1))),
            "The shape of the raw input 'IN0' can not be deduced because there are more than one variable-sized "
            "dimension",
        ),
        (spec(("BYTES", (-1,))), "For BYTE datatype raw input 'IN0', the model must have input shape [1]"),
        (spec(("BYTES", (2,))), "For BYTE datatype raw input 'IN0', the model must have input shape [1]"),
        (spec(("INT32", (-1,))), "input byte size mismatch for input 'raw_input' for model 'm'. Expected 8, got 11"),
        (spec(("INT32", (4,))), "input byte size mismatch for input 'raw_input' for model 'm'. Expected 16, got 11"),
    ],
)
def test_what_cannot_be_deduced_is_refused_with_tritons_text(model: ModelSpec, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode_raw(b"eleven byte", model)
    assert caught.value.message == PREFIX + text

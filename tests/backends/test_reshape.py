from __future__ import annotations

import numpy as np
import pytest

from backends.reshape import TensorShapes, input_array, output_array, tensor_specs
from kernel.errors import InternalError, InvalidArgument
from shm.tensor import Tensor


def test_integers_of_a_configuration_may_be_numbers_or_strings() -> None:
    config = {
        "max_batch_size": 4,
        "input": [
            {"name": "A", "data_type": "TYPE_STRING", "dims": ["6", -1], "reshape": {"shape": [2, 3, "-1"]}},
            {"name": "B", "data_type": "TYPE_BF16", "dims": [1], "reshape": {}, "optional": True},
        ],
    }
    assert tensor_specs(config, "input") == {
        "A": TensorShapes("A", "BYTES", (6, -1), (2, 3, -1), batched=True),
        "B": TensorShapes("B", "BF16", (1,), (), batched=True, optional=True),
    }


def test_only_outputs_can_have_the_shape_of_a_source_input() -> None:
    entries = [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}]
    config = {
        "input": entries,
        "output": entries,
        "batch_output": [{"target_name": ["X"], "source_input": ["S"]}],
    }
    assert tensor_specs(config, "output")["X"].shaped_like == "S"
    assert tensor_specs(config, "input")["X"].shaped_like is None


@pytest.mark.parametrize(
    ("spec", "client", "model"),
    [
        (TensorShapes("T", "FP32", (6,), (2, 3)), [6], [2, 3]),
        (TensorShapes("T", "FP32", (6,), (2, 3), batched=True), [5, 6], [5, 2, 3]),
        (TensorShapes("T", "FP32", (-1, 4, -1), (-1, 2, 2, -1), batched=True), [5, 7, 4, 9], [5, 7, 2, 2, 9]),
        (TensorShapes("T", "FP32", (1,), (), batched=True), [5, 1], [5]),
        (TensorShapes("T", "FP32", (6,)), [6], [6]),
    ],
)
def test_client_shapes_and_model_shapes_are_converted_to_each_other(
    spec: TensorShapes, client: list[int], model: list[int]
) -> None:
    assert spec.model_shape(client) == model
    assert spec.client_shape(model) == client


def test_an_input_is_a_view_in_place() -> None:
    memory = bytearray(np.arange(6, dtype=np.float32).tobytes())
    view = Tensor("A", "FP32", [6], memoryview(memory))
    array = input_array(view, TensorShapes("A", "FP32", (6,), (2, 3)))
    array[1, 2] = 50
    assert array.shape == (2, 3)
    assert np.frombuffer(memory, np.float32)[5] == 50


def test_an_array_of_client_memory_is_read_only() -> None:
    view = Tensor("A", "FP32", [1], memoryview(bytes(4)))
    assert not input_array(view, None).flags.writeable


def test_misaligned_memory_is_copied() -> None:
    memory = bytes(1) + np.arange(3, dtype=np.float64).tobytes()
    array = input_array(Tensor("A", "FP64", [3], memoryview(memory)[1:]), None)
    assert array.flags.aligned
    assert array.tolist() == [0, 1, 2]


def test_bf16_becomes_uint16() -> None:
    array = input_array(Tensor("A", "BF16", [2], memoryview(b"\x80\x3f\x00\x40")), None)
    assert array.dtype == np.uint16
    assert array.tolist() == [0x3F80, 0x4000]


def test_an_input_without_elements_keeps_its_shape() -> None:
    assert input_array(Tensor("A", "FP32", [0, 4], memoryview(b"")), None).shape == (0, 4)


def test_an_input_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="input 'A' does not hold a tensor of shape"):
        input_array(Tensor("A", "FP32", [2], memoryview(bytes(4))), None)


@pytest.mark.parametrize("shape", [(2, 2), (2, 3, 1), ()])
def test_an_output_of_an_unexpected_shape_cannot_be_reshaped(shape: tuple[int, ...]) -> None:
    spec = TensorShapes("OUT", "FP32", (6,), (2, 3))
    with pytest.raises(InternalError, match=r"output 'OUT' of shape \[.*\] cannot be reshaped to \[6\]"):
        output_array(np.zeros(shape, np.float32), spec)

from __future__ import annotations

from typing import Any

import pytest

from backends.onnxruntime.autofill import autofill, default_max_batch_size, is_complete
from backends.onnxruntime.signature import OnnxSignature, tensor_of
from kernel.errors import InvalidArgument, Unsupported

Dims = list[int | str | None]


def signature(input_dims: Dims, output_dims: Dims, onnx_type: str = "tensor(float)") -> OnnxSignature:
    return OnnxSignature(
        {"A": tensor_of("A", onnx_type, input_dims)}, {"X": tensor_of("X", "tensor(int64)", output_dims)}
    )


def filled(given: OnnxSignature, **config: Any) -> dict[str, Any]:
    return autofill({"name": "m", **config}, given, 4)


def test_a_model_that_can_batch_gets_the_default_batch_size_and_a_dynamic_batcher() -> None:
    assert filled(signature(["N", 3], [None, None])) == {
        "name": "m",
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [3]}],
        "output": [{"name": "X", "data_type": "TYPE_INT64", "dims": [-1]}],
    }


@pytest.mark.parametrize(("input_dims", "output_dims"), [([2, 3], ["N", 3]), (["N", 3], [2]), (["N", 3], [])])
def test_a_model_with_a_fixed_first_dimension_does_not_batch(input_dims: Dims, output_dims: Dims) -> None:
    config = filled(signature(input_dims, output_dims))
    assert config["max_batch_size"] == 0
    assert "dynamic_batching" not in config
    assert config["input"][0]["dims"] == [-1 if dim == "N" else dim for dim in input_dims]


def test_a_batch_size_of_a_model_that_cannot_batch_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        filled(signature([2, 3], [2]), max_batch_size=8)
    assert caught.value.message == (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified"
    )


def test_configured_fields_are_kept() -> None:
    inputs = [{"name": "A", "data_type": "TYPE_FP32", "dims": [3]}]
    config = filled(signature(["N", 3], ["N"]), max_batch_size=8, sequence_batching={}, input=inputs)
    assert config["max_batch_size"] == 8
    assert config["input"] is inputs
    assert "dynamic_batching" not in config
    assert config["output"] == [{"name": "X", "data_type": "TYPE_INT64", "dims": [1], "reshape": {"shape": []}}]


def test_a_batch_size_of_one_adds_no_batcher() -> None:
    assert "dynamic_batching" not in filled(signature(["N"], ["N"]), max_batch_size=1)


def test_a_scalar_without_batching_is_one_element() -> None:
    assert filled(signature([], []))["input"] == [{"name": "A", "data_type": "TYPE_FP32", "dims": [1]}]


def test_a_datatype_that_no_client_can_send_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"unsupported datatype tensor\(complex64\) for I/O 'A'"):
        filled(signature(["N"], ["N"], "tensor(complex64)"))


@pytest.mark.parametrize(
    ("onnx_type", "name"),
    [("seq(tensor(float))", "ONNX_TYPE_SEQUENCE"), ("map(int64,float)", "ONNX_TYPE_MAP")],
)
def test_values_other_than_tensors_are_refused(onnx_type: str, name: str) -> None:
    with pytest.raises(Unsupported) as caught:
        tensor_of("Z", onnx_type, [])
    assert caught.value.message == f"Unsupported ONNX Type '{name}' for I/O 'Z', expected 'ONNX_TYPE_TENSOR'."


def test_the_refusal_of_a_scikit_learn_classifier_names_the_option_that_helps() -> None:
    with pytest.raises(Unsupported, match="zipmap=False"):
        tensor_of("Z", "seq(map(int64,tensor(float)))", [])


def test_tensors_whose_rank_the_file_leaves_open_are_to_be_configured() -> None:
    given = OnnxSignature(
        {"A": tensor_of("A", "tensor(float)", [], any_rank=True)}, {"X": tensor_of("X", "tensor(float)", ["N", 2])}
    )
    with pytest.raises(InvalidArgument, match=r"how many dimensions 'A' has; .* name: \"A\" data_type: TYPE_FP32"):
        filled(given)
    inputs = [{"name": "A", "data_type": "TYPE_FP32", "dims": [3]}]
    assert filled(given, input=inputs)["max_batch_size"] == 0
    assert filled(given, input=inputs, max_batch_size=8)["output"][0]["dims"] == [2]


def test_a_configuration_with_inputs_and_outputs_is_complete() -> None:
    assert is_complete({"input": [{}], "output": [{}]})
    assert is_complete({"batch_input": [{}], "output": [{}]})
    assert not is_complete({"input": [{}]})
    assert not is_complete({"input": [], "output": [{}]})


def test_the_default_batch_size_comes_from_the_command_line() -> None:
    assert default_max_batch_size({}) == 4
    assert default_max_batch_size({"default-max-batch-size": "16"}) == 16
    with pytest.raises(InvalidArgument, match="^failed to convert 'many' to integral number$"):
        default_max_batch_size({"default-max-batch-size": "many"})


@pytest.mark.parametrize(("default", "max_batch_size"), [(0, 0), (-1, 0), (1, 1), (9, 9)])
def test_a_default_batch_size_below_one_means_no_batching(default: int, max_batch_size: int) -> None:
    config = autofill({"name": "m"}, signature(["N", 3], ["N"]), default)
    assert config["max_batch_size"] == max_batch_size
    assert ("dynamic_batching" in config) == (max_batch_size > 1)

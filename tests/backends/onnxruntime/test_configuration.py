from __future__ import annotations

from typing import Any

import pytest

from backends.onnxruntime.configuration import autofill, check_agreement, default_max_batch_size, is_complete
from backends.onnxruntime.signature import OnnxSignature, OnnxTensor, tensor_of
from kernel.errors import InvalidArgument, ServingError, Unsupported

Dims = list[int | str | None]


def tensors(**dims: Dims) -> dict[str, OnnxTensor]:
    return {name: tensor_of(name, "tensor(float)", shape) for name, shape in dims.items()}


SIGNATURE = OnnxSignature(tensors(A=["N", 16]), tensors(X=["N", 16], Y=["N"]))


def entry(name: str, dims: list[int], data_type: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": dims, **more}


def refusal(signature: OnnxSignature, **config: Any) -> str:
    with pytest.raises(ServingError) as caught:
        check_agreement({"name": "m", "output": [], **config}, signature)
    return caught.value.message


def test_a_configuration_that_agrees_with_the_file_is_accepted() -> None:
    config = {"name": "m", "max_batch_size": 8, "input": [entry("A", [16])], "output": [entry("X", [16])]}
    check_agreement(config, SIGNATURE)
    check_agreement({**config, "max_batch_size": 0, "input": [entry("A", [-1, 16])], "output": []}, SIGNATURE)


def test_the_configuration_may_fix_variable_dimensions_of_inputs_only() -> None:
    check_agreement({"name": "m", "input": [entry("A", [2, 16])], "output": []}, SIGNATURE)
    assert refusal(SIGNATURE, input=[entry("A", [2, 16])], output=[entry("X", [2, 16])]) == (
        "model 'm', tensor 'X': the model expects 2 dimensions (shape [-1,16]) but the model configuration "
        "specifies 2 dimensions (shape [2,16])"
    )


def test_the_error_of_wrong_dimensions_includes_the_batch_dimension() -> None:
    assert refusal(SIGNATURE, max_batch_size=8, input=[entry("A", [4, 4])]) == (
        "model 'm', tensor 'A': the model expects 2 dimensions (shape [-1,16]) but the model configuration "
        "specifies 3 dimensions (an initial batch dimension because max_batch_size > 0 followed by the "
        "explicit tensor shape, making complete shape [-1,4,4])"
    )


def test_where_the_file_leaves_the_rank_open_the_configuration_is_believed() -> None:
    signature = OnnxSignature(
        {"A": tensor_of("A", "tensor(float)", [], any_rank=True)},
        {"X": tensor_of("X", "tensor(float)", [], any_rank=True)},
    )
    for dims in ([1], [3, -1]):
        check_agreement({"name": "m", "input": [entry("A", dims)], "output": [entry("X", dims)]}, signature)
        config = {"name": "m", "max_batch_size": 2, "input": [entry("A", dims)], "output": [entry("X", dims)]}
        check_agreement(config, signature)


def test_the_file_is_compared_with_the_reshaped_dimensions() -> None:
    reshaped = entry("A", [4, 4], reshape={"shape": [16]})
    check_agreement({"name": "m", "max_batch_size": 8, "input": [reshaped], "output": []}, SIGNATURE)


def test_a_model_with_a_fixed_first_dimension_cannot_batch() -> None:
    assert refusal(OnnxSignature(tensors(A=[2, 16]), {}), max_batch_size=8, input=[entry("A", [16])]) == (
        "model 'm', tensor 'A': for the model to support batching the shape should have at least 1 "
        "dimension and the first dimension must be -1; but shape expected by the model is [2,16]"
    )


def test_the_error_of_an_unknown_name_lists_the_model_s_names() -> None:
    assert refusal(SIGNATURE, input=[entry("B", [16])]) == ("unexpected inference input 'B', allowed inputs are: A")
    assert refusal(SIGNATURE, input=[entry("A", [-1, 16])], output=[entry("Z", [16])]) == (
        "unexpected inference output 'Z', allowed outputs are: X, Y"
    )


def test_a_wrong_number_of_inputs_is_refused() -> None:
    assert refusal(SIGNATURE, input=[]) == (
        "unable to load model 'm', configuration expects 0 inputs, model provides 1"
    )


def test_a_wrong_datatype_is_refused() -> None:
    assert refusal(SIGNATURE, input=[entry("A", [-1, 16], "TYPE_INT32")]) == (
        "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'A', model provides TYPE_FP32"
    )
    strings = OnnxSignature({"A": tensor_of("A", "tensor(string)", [1])}, {})
    assert refusal(strings, input=[entry("A", [1])]).endswith("model provides TYPE_BYTES")


def test_optional_inputs_are_replaceable_constants() -> None:
    signature = OnnxSignature(tensors(A=[4]), {}, tensors(W=[4]))
    optional = entry("W", [4], optional=True)
    check_agreement({"name": "m", "input": [entry("A", [4]), optional], "output": []}, signature)
    assert refusal(signature, max_batch_size=4, input=[entry("A", []), optional]) == (
        "model 'm', tensor 'A': for the model to support batching the shape should have at least 1 "
        "dimension and the first dimension must be -1; but shape expected by the model is [4]"
    )
    assert refusal(signature, max_batch_size=4, input=[optional, entry("A", [])]) == (
        "unable to load model 'm', optional input 'W' is not supported for models that support batching"
    )


def test_scalars_are_configured_with_one_element() -> None:
    signature = OnnxSignature(tensors(A=[]), tensors(X=[]))
    check_agreement({"name": "m", "input": [entry("A", [1])], "output": [entry("X", [1, 1])]}, signature)
    assert refusal(signature, input=[entry("A", [2])]) == (
        "unable to load model 'm', scalar tensor 'A', should only provide 1 in the model configuration when "
        "the model doesn't support batching. Model configuration provided: [2]."
    )


def test_a_ragged_input_has_one_dimension_in_the_model() -> None:
    ragged = entry("A", [-1], allow_ragged_batch=True)
    check_agreement(
        {"name": "m", "max_batch_size": 4, "input": [ragged], "output": []},
        OnnxSignature(tensors(A=[None]), {}),
    )
    assert refusal(SIGNATURE, max_batch_size=4, input=[ragged]).endswith(
        "with shape [-1]  for ragged input 'A', model provides [-1,16]"
    )


def controls(name: str, **control: Any) -> dict[str, Any]:
    kind = {"kind": "CONTROL_SEQUENCE_START", **control}
    return {"control_input": [{"name": name, "control": [kind]}]}


def test_sequence_controls_are_inputs_of_the_model() -> None:
    signature = OnnxSignature(tensors(START=["N", 1], WIDE=["N", 2]), {})
    floats = {"fp32_false_true": [0, 1]}
    assert refusal(signature, max_batch_size=4, sequence_batching=controls("NONE", **floats)) == (
        "configuration specified sequence control 'NONE', but model does not provide that input"
    )
    assert refusal(signature, max_batch_size=4, sequence_batching=controls("WIDE", **floats)) == (
        "unable to load model 'm', sequence control 'WIDE' in model has dims [2] but dims [1] is expected"
    )
    integers = controls("START", int32_false_true=[0, 1])
    assert refusal(signature, max_batch_size=4, sequence_batching=integers) == (
        "unable to load model 'm', sequence control 'START', the model expects data-type FLOAT but the model "
        "configuration specifies data-type TYPE_INT32"
    )
    alone = OnnxSignature(tensors(START=["N", 1]), {})
    config = {"name": "m", "max_batch_size": 4, "sequence_batching": controls("START", **floats)}
    check_agreement(config, alone)


def test_states_are_inputs_and_outputs_of_the_model() -> None:
    signature = OnnxSignature(tensors(A=["N"], IN=["N"]), tensors(X=["N"], OUT=["N"]))
    state = {"input_name": "IN", "output_name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}
    inputs = [entry("A", [1], reshape={"shape": []})]
    config = {"name": "m", "max_batch_size": 4, "input": inputs, "sequence_batching": {"state": [state]}}
    check_agreement(config, signature)
    state["data_type"] = "TYPE_INT64"
    assert "for output state 'OUT', model provides TYPE_FP32" in refusal(signature, **config)


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

from __future__ import annotations

from typing import Any

import pytest

from backends.pytorch.model_file import Argument, ModelSignature
from backends.pytorch.naming import Places, places
from kernel.errors import InternalError, InvalidArgument, ServingError
from tests.backends.pytorch.conftest import config_of, tensors

OUTPUTS = tensors("OUTPUT__0")


def signature(*arguments: str, **more: Any) -> ModelSignature:
    return ModelSignature(tuple(Argument(name, "TensorType") for name in arguments), **more)


def found(inputs: tuple[str, ...], outputs: tuple[str, ...] = ("OUTPUT__0",), **more: Any) -> Places:
    names = tuple(f"argument{index}" for index in range(len(inputs)))
    return places(config_of(tensors(*inputs), tensors(*outputs), **more), signature(*names))


def test_names_of_arguments_come_first() -> None:
    assert found(("argument1", "argument0")).inputs == {"argument1": 1, "argument0": 0}


def test_an_index_in_the_name_comes_next() -> None:
    assert found(("INPUT__1", "INPUT__0")).inputs == {"INPUT__1": 1, "INPUT__0": 0}
    assert found(("x",), ("B__1", "A__0")).outputs == {"B__1": 1, "A__0": 0}


def test_else_the_order_counts() -> None:
    assert found(("x", "INPUT__0")).inputs == {"x": 0, "INPUT__0": 1}
    assert found(("x",), ("b", "a")).outputs == {"b": 0, "a": 1}
    assert found(("x",)).warnings == ()


def test_an_index_that_is_no_number_is_named_in_the_log() -> None:
    assert found(("INPUT__a",), ("OUTPUT__b",)).warnings == (
        "input 'INPUT__a' or previous input(s) are neither an input argument to the model 'model' nor do they follow "
        "the <name>__<index> naming convention. Falling back to enforcing strict ordering from model configuration.",
        "output 'OUTPUT__b' or previous output(s) of the model 'model' do not follow the <name>__<index> naming "
        "convention. Falling back to enforcing strict ordering from model configuration.",
    )


def test_paths_of_a_pt2_file_count_more_than_all_else() -> None:
    paths = signature("a", "b", input_paths=("ARGS[0]", "KWARGS[b]"), output_paths=("RESULT[0]", "RESULT[x]"))
    result = places(config_of(tensors("KWARGSb", "ARGS[0]"), tensors("RESULT[x]")), paths)
    assert result == Places({"KWARGSb": 1, "ARGS[0]": 0}, {"RESULT[x]": 1})
    assert places(config_of(tensors("b", "a"), OUTPUTS), paths).inputs == {"b": 1, "a": 0}
    with pytest.raises(InvalidArgument, match="an output index which doesn't exist. This model has 2 outputs"):
        places(config_of(tensors("a", "b"), tensors("OUTPUT__2")), paths)


def test_control_tensors_and_states_have_an_index() -> None:
    control = {"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}
    batching: dict[str, Any] = {
        "control_input": [{"name": "START__1", "control": [control]}],
        "state": [{"input_name": "S__2", "output_name": "T__1", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    three = signature("x", "y", "z")
    result = places(config_of(tensors("I__0"), OUTPUTS, sequence_batching=batching), three)
    assert result.inputs == {"START__1": 1, "I__0": 0, "S__2": 2}
    assert result.outputs == {"OUTPUT__0": 0, "T__1": 1}
    with pytest.raises(InvalidArgument, match="is using sequence batching with state but not all inputs and outputs"):
        places(config_of(tensors("x"), OUTPUTS, sequence_batching=batching), three)
    batching["state"][0]["input_name"] = "S"
    with pytest.raises(InvalidArgument, match="but state 'S' does not follow the <name>__<index> naming convention. "):
        places(config_of(tensors("I__0"), OUTPUTS, sequence_batching=batching), three)
    batching["control_input"][0]["name"] = "START"
    with pytest.raises(InternalError, match="input 'START' does not follow <name>__<index> naming convention."):
        places(config_of(tensors("I__0"), OUTPUTS, sequence_batching=batching), three)
    correlation = {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64"}
    batching["control_input"] = [{"name": "ID__1", "control": [correlation]}]
    with pytest.raises(InternalError, match="input 'ID__1' type 'TYPE_UINT64' is not supported by PyTorch."):
        places(config_of(tensors("I__0"), OUTPUTS, sequence_batching=batching), three)


@pytest.mark.parametrize(
    ("config", "given", "text"),
    [
        (config_of(tensors("a"), OUTPUTS), signature("a", "b"),
         "unable to load model 'model', configuration expects 1 inputs, model provides 2"),
        (config_of(tensors("I__0", "J__0"), OUTPUTS), signature("a", "b"),
         "unable to load model 'model', the inputs 'I__0' and 'J__0' are both argument 0 of the model"),
        (config_of(tensors("I__1"), OUTPUTS), signature("a"),
         "unable to load model 'model', the input 'I__1' is argument 1 of the model, which has 1 arguments, "
         "from 0 to 0"),
        (config_of(tensors("a", datatype="UINT64"), OUTPUTS), signature("a"),
         "unsupported datatype TYPE_UINT64 for input 'a' for model 'model'"),
        (config_of(tensors("a", datatype="STRING"), OUTPUTS, batch=1), signature("a"),
         "Triton only supports 1 dimensional List of String as input for 'a' for model 'model'"),
        (config_of([], OUTPUTS), signature(),
         "model configuration must contain at least one input, none were specified."),
        (config_of(tensors("a"), []), signature("a"),
         "model configuration must contain at least one output, none were specified."),
        (config_of(tensors("a"), OUTPUTS), ModelSignature((Argument("a", "IntType", "int"),)),
         "An input of type 'int' was detected in the model. Only a single input of type Dict(str, Tensor) or input(s) "
         "of type Tensor are supported."),
        (config_of(tensors("a"), OUTPUTS), ModelSignature((Argument("a", "TensorType"), Argument("b", "DictType"))),
         "Multiple inputs of kind DictType were detected. Only a single input of type Dict(str, Tensor) is supported."),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused(config: dict[str, Any], given: ModelSignature, text: str) -> None:
    with pytest.raises(ServingError) as refused:
        places(config, given)
    assert refused.value.message == text

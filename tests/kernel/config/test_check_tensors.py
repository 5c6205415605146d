from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.config.check import check_complete
from kernel.config.gpus import NO_GPUS
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.generated.model_config_pb2 import ModelConfig

    Prepare = Callable[..., ModelConfig]

FP32 = 'name: "X" data_type: TYPE_FP32 '
ANY_SIZE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def failure_of(config: ModelConfig) -> str:
    with pytest.raises(BadConfig) as caught:
        check_complete(config, gpus=NO_GPUS)
    return caught.value.message


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("data_type: TYPE_FP32 dims: 1", "must specify 'name'"),
        ('name: "X" dims: 1', "'X' must specify 'data_type'"),
        ('name: "X" data_type: 99 dims: 1', "'X' must specify 'data_type'"),
        (FP32, "'X' must specify 'dims'"),
        (FP32 + "dims: 0", f"'X' dimension {ANY_SIZE}"),
        (FP32 + "dims: [1, -2]", f"'X' dimension {ANY_SIZE}"),
        (
            FP32 + "dims: 1 reshape { shape: [] }",
            "'X' cannot have empty reshape for non-batching model as scalar tensors are not supported",
        ),
        (FP32 + "dims: 1 reshape { shape: 0 }", f"'X' reshape dimensions {ANY_SIZE}"),
        (FP32 + "dims: 6 reshape { shape: [2, 2] }", "'X' has different size for dims and reshape"),
        (FP32 + "dims: -1 reshape { shape: 4 }", "'X' has different size for dims and reshape"),
        (FP32 + "dims: 4 reshape { shape: -1 }", "'X' has different size for dims and reshape"),
        (
            FP32 + "dims: -1 reshape { shape: [-1, -1] }",
            "'X' has different number of variable-size dimensions for dims and reshape",
        ),
        (
            FP32 + "dims: [-1, 2, -1] reshape { shape: [2, -1, -1] }",
            "'X' has different size for dims and reshape",
        ),
    ],
)
def test_a_wrong_tensor_is_refused(kind: str, tensor: str, message: str, prepared: Prepare) -> None:
    config = prepared(f'backend: "python" {kind} [{{ {tensor} }}]')
    assert failure_of(config) == f"model {kind} {message} for m"


@pytest.mark.parametrize(
    "tensor",
    [
        "dims: [2, 3]",
        "dims: [-1, 4, -1]",
        "dims: 6 reshape { shape: [2, 3] }",
        "dims: [2, -1, 6] reshape { shape: [2, -1, 2, 3] }",
        "dims: 1 reshape { shape: [] }",
    ],
)
def test_a_valid_tensor_passes(tensor: str, prepared: Prepare) -> None:
    config = prepared(f'backend: "python" max_batch_size: 2 input [{{ {FP32} {tensor} }}]')
    check_complete(config, gpus=NO_GPUS)


@pytest.mark.parametrize("kind", ["input", "output"])
def test_tensorrt_features_are_refused_for_other_backends(kind: str, prepared: Prepare) -> None:
    text = f'backend: "%s" {kind} [{{ {FP32} dims: %s %s: true }}]'
    assert failure_of(prepared(text % ("python", 3, "is_shape_tensor"))) == (
        "shape tensors are only supported for TensorRT platform for m"
    )
    assert failure_of(prepared(text % ("python", 3, "is_non_linear_format_io"))) == (
        "Non-linear IO format is only supported for the TensorRT platform for m"
    )
    check_complete(prepared(text % ("tensorrt", 3, "is_shape_tensor")), NO_GPUS)
    check_complete(prepared(text % ("tensorrt", [1, 2, 3], "is_non_linear_format_io")), NO_GPUS)
    assert failure_of(prepared(text % ("tensorrt", 3, "is_non_linear_format_io"))) == (
        f"Non-linear IO format {kind} requires 3 dims for m"
    )


def test_an_image_format_needs_three_dimensions(prepared: Prepare) -> None:
    text = f'backend: "python" input [{{ {FP32} format: FORMAT_NHWC dims: %s }}]'
    check_complete(prepared(text % [2, 2, 3]), NO_GPUS)
    assert failure_of(prepared(text % [2, 3])) == "model input NHWC/NCHW require 3 dims for m"


@pytest.mark.parametrize(
    ("derived", "message"),
    [
        (
            'batch_input [{ kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32 }]',
            "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0",
        ),
        (
            'batch_input [{ kind: BATCH_ITEM_SHAPE data_type: TYPE_FP32 source_input: ["INPUT0", "INPUT1"]}]',
            "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 2",
        ),
        (
            'batch_input [{ data_type: TYPE_INT64 source_input: "INPUT0" }]',
            "batch input data type must be TYPE_INT32 or TYPE_FP32",
        ),
        ('batch_input [{ data_type: TYPE_FP32 source_input: "Z" }]', "unknown source input name 'Z'"),
        # An enum field may contain a number without a name; Triton then prints an empty name.
        ('batch_input [{ kind: 9 data_type: TYPE_FP32 source_input: "INPUT0" }]', "unknown batch input kind ''"),
        ('batch_output [{ kind: 9 target_name: "OUTPUT0" source_input: "INPUT0" }]', "unknown batch output kind ''"),
        (
            'batch_output [{ target_name: "OUTPUT0" }]',
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0",
        ),
        ('batch_output [{ target_name: "OUTPUT0" source_input: "Z" }]', "unknown source input name 'Z'"),
        ('batch_output [{ target_name: "Z" source_input: "INPUT0" }]', "unknown target output name 'Z'"),
        (
            'batch_output [{ target_name: ["OUTPUT0", "OUTPUT0"] source_input: "INPUT0" }]',
            "target output name 'OUTPUT0' can only be specified once",
        ),
    ],
)
def test_a_wrong_derived_tensor_is_refused(derived: str, message: str, tensors: str, prepared: Prepare) -> None:
    assert failure_of(prepared('backend: "python"' + tensors + derived)) == f"{message} for m"


def test_valid_derived_tensors_pass(tensors: str, prepared: Prepare) -> None:
    derived = """
        batch_input [{ kind: BATCH_ITEM_SHAPE target_name: "N" data_type: TYPE_FP32 source_input: "INPUT0" }]
        batch_output [{ target_name: "OUTPUT0" source_input: "INPUT1" }]
    """
    check_complete(prepared('backend: "python"' + tensors + derived), NO_GPUS)

"""The rules for inputs, outputs, batch inputs and batch outputs."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import (
    TYPE_FP32,
    TYPE_INT32,
    TYPE_INVALID,
    BatchInput,
    BatchOutput,
    DataType,
    ModelInput,
)
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.config.generated.model_config_pb2 import ModelConfig, ModelOutput

_DIMENSION_RULE = "integer >= 1, or -1 to indicate a variable-size dimension"


def check_tensors(config: ModelConfig) -> None:
    """Check all inputs, then all outputs. Raises `BadConfig`."""
    for given in config.input:
        _check_shape(given, "model input", config)
        _check_format(given, config)
        _check_tensorrt_only(given, "input", config)
    for produced in config.output:
        _check_shape(produced, "model output", config)
        _check_tensorrt_only(produced, "output", config)


def _check_shape(tensor: ModelInput | ModelOutput, kind: str, config: ModelConfig) -> None:
    if not tensor.name:
        raise BadConfig(f"{kind} must specify 'name' for {config.name}")
    shown = f"{kind} '{tensor.name}'"
    # A protobuf enum field may contain a number that has no name.
    if tensor.data_type == TYPE_INVALID or tensor.data_type not in DataType.values():
        raise BadConfig(f"{shown} must specify 'data_type' for {config.name}")
    if not tensor.dims:
        raise BadConfig(f"{shown} must specify 'dims' for {config.name}")
    if tensor.HasField("reshape") and not tensor.reshape.shape and config.max_batch_size == 0:
        raise BadConfig(
            f"{shown} cannot have empty reshape for non-batching model as scalar tensors are not supported "
            f"for {config.name}"
        )
    if not _are_dimensions(tensor.dims):
        raise BadConfig(f"{shown} dimension must be {_DIMENSION_RULE} for {config.name}")
    if tensor.HasField("reshape"):
        _check_reshape(tensor, shown, config.name)


def _check_reshape(tensor: ModelInput | ModelOutput, shown: str, model: str) -> None:
    """Check that `reshape` has as many elements as `dims`, also between any two variable dimensions."""
    dims, shape = list(tensor.dims), list(tensor.reshape.shape)
    if not _are_dimensions(shape):
        raise BadConfig(f"{shown} reshape dimensions must be {_DIMENSION_RULE} for {model}")
    given, wanted = _fixed_sizes(dims), _fixed_sizes(shape)
    if len(given) > 1 and len(wanted) > 1 and len(given) != len(wanted):
        raise BadConfig(f"{shown} has different number of variable-size dimensions for dims and reshape for {model}")
    # As in Triton, an empty shape has one element.
    if given != wanted:
        raise BadConfig(f"{shown} has different size for dims and reshape for {model}")


def _are_dimensions(dims: Iterable[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _fixed_sizes(dims: Sequence[int]) -> list[int]:
    """Return the element counts before, between and after the variable dimensions."""
    variable = [-1, *(index for index, dim in enumerate(dims) if dim == -1), len(dims)]
    return [math.prod(dims[before + 1 : after]) for before, after in pairwise(variable)]


def _check_format(tensor: ModelInput, config: ModelConfig) -> None:
    if tensor.format in (ModelInput.FORMAT_NHWC, ModelInput.FORMAT_NCHW) and len(tensor.dims) != 3:
        raise BadConfig(f"model input NHWC/NCHW require 3 dims for {config.name}")


def _check_tensorrt_only(tensor: ModelInput | ModelOutput, kind: str, config: ModelConfig) -> None:
    is_tensorrt = config.platform == "tensorrt_plan"
    if tensor.is_shape_tensor and not is_tensorrt:
        raise BadConfig(f"shape tensors are only supported for TensorRT platform for {config.name}")
    if tensor.is_non_linear_format_io and not is_tensorrt:
        raise BadConfig(f"Non-linear IO format is only supported for the TensorRT platform for {config.name}")
    if tensor.is_non_linear_format_io and len(tensor.dims) != 3:
        raise BadConfig(f"Non-linear IO format {kind} requires 3 dims for {config.name}")


def check_sources(config: ModelConfig) -> None:
    """Check the parts of batch inputs and outputs that do not depend on the model's tensors. Raises `BadConfig`."""
    for batch_input in config.batch_input:
        _check_batch_input(batch_input, config.name)
    for batch_output in config.batch_output:
        _check_batch_output(batch_output, config.name)


def _check_batch_input(derived: BatchInput, model: str) -> None:
    kind = _kind_name(BatchInput, derived.kind, "input", model)
    _check_source_count(derived.source_input, f"batch input kind '{kind}'", model)
    if derived.data_type not in (TYPE_INT32, TYPE_FP32):
        raise BadConfig(f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {model}")


def _check_batch_output(derived: BatchOutput, model: str) -> None:
    kind = _kind_name(BatchOutput, derived.kind, "output", model)
    _check_source_count(derived.source_input, f"batch output kind '{kind}'", model)


def check_batch_inputs(config: ModelConfig) -> None:
    inputs = {tensor.name for tensor in config.input}
    for derived in config.batch_input:
        _check_batch_input(derived, config.name)
        _check_sources(derived.source_input, inputs, config.name)


def check_batch_outputs(config: ModelConfig) -> None:
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    for derived in config.batch_output:
        _check_batch_output(derived, config.name)
        _check_sources(derived.source_input, inputs, config.name)
        seen: set[str] = set()
        for target in derived.target_name:
            if target not in outputs:
                raise BadConfig(f"unknown target output name '{target}' for {config.name}")
            if target in seen:
                raise BadConfig(f"target output name '{target}' can only be specified once for {config.name}")
            seen.add(target)


def _kind_name(message: type[BatchInput | BatchOutput], kind: int, which: str, model: str) -> str:
    # A protobuf enum field may contain a number that has no name. Triton then prints an empty name.
    known = message.Kind.DESCRIPTOR.values_by_number.get(kind)
    if known is None:
        raise BadConfig(f"unknown batch {which} kind '' for {model}")
    return known.name


def _check_source_count(sources: Sequence[str], kind: str, model: str) -> None:
    if len(sources) != 1:
        raise BadConfig(f"{kind} expects 1 source input, got {len(sources)} for {model}")


def _check_sources(sources: Sequence[str], inputs: set[str], model: str) -> None:
    for source in sources:
        if source not in inputs:
            raise BadConfig(f"unknown source input name '{source}' for {model}")

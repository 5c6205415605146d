"""Every rule that a configuration must satisfy, with Triton's error texts; one function per rule.

`check_config` runs before and after a backend completes the configuration, `check_complete` only after.
Both expect a configuration that is filled in and normalised (`autofill.py`). They check the rules in
Triton's order and raise at the first broken one. Rules for inputs, outputs, batch inputs and batch outputs stand last.
"""

from __future__ import annotations

import math
import posixpath
from itertools import pairwise
from typing import TYPE_CHECKING

from kernel.config.check_ensemble import check_ensemble
from kernel.config.check_sequence import check_sequence_batching, check_states
from kernel.config.generated.model_config_pb2 import (
    TYPE_FP32,
    TYPE_INT32,
    TYPE_INVALID,
    BatchInput,
    BatchOutput,
    DataType,
    ModelInput,
    ModelInstanceGroup,
    ModelQueuePolicy,
)
from kernel.config.model_parameters import model_parameters
from kernel.errors import BadConfig, InternalError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.config.generated.model_config_pb2 import ModelConfig, ModelOutput
    from kernel.config.gpus import UsableGpus

#: Backend → the platforms that it accepts. Other backends accept any platform.
_PLATFORMS = {
    "tensorflow": ("tensorflow_graphdef", "tensorflow_savedmodel"),
    "tensorrt": ("tensorrt_plan",),
    "onnxruntime": ("onnxruntime_onnx",),
    "pytorch": ("pytorch_libtorch", "torch_aoti"),
}


def check_config(config: ModelConfig, directory_name: str) -> None:
    """Check the rules that need no completed configuration. Raises `BadConfig`, or `Unsupported` for paths."""
    check_name(config)
    check_backend(config)
    check_platform(config)
    check_max_batch_size(config)
    check_preferred_batch_sizes(config)
    check_priority_levels(config)
    check_preserve_ordering(config)
    check_sequence_batching(config)
    check_scheduling_of_ensembles(config)
    check_response_cache(config)
    check_model_metrics(config)
    model_parameters(config)
    check_directory_name(config, directory_name)
    check_paths(config)


def check_complete(config: ModelConfig, gpus: UsableGpus) -> None:
    """Check instance groups, inputs and outputs. Raises `BadConfig`, or `InternalError` for KIND_AUTO."""
    check_instance_groups(config, gpus)
    check_inputs_and_outputs(config)
    check_states(config)


def check_before_completion(config: ModelConfig, gpus: UsableGpus) -> None:
    """Check what a worker reads and no backend completes, so that no worker fails on it. Raises as `check_complete`."""
    check_instance_groups(config, gpus)
    check_sources(config)
    check_states(config)


def check_inputs_and_outputs(config: ModelConfig) -> None:
    check_tensors(config)
    check_batch_inputs(config)
    check_batch_outputs(config)


def check_name(config: ModelConfig) -> None:
    if not config.name:
        raise BadConfig("model configuration must specify 'name'")


def check_directory_name(config: ModelConfig, directory_name: str) -> None:
    if config.name != directory_name:
        raise BadConfig(
            f"unexpected directory name '{directory_name}' for model '{config.name}', "
            "directory name must equal model name"
        )


def check_backend(config: ModelConfig) -> None:
    if not config.backend and config.platform != "ensemble":
        raise BadConfig(f"unexpected platform type '{config.platform}' for {config.name}")
    if config.backend and config.platform == "ensemble":
        raise BadConfig(f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend type")


def check_platform(config: ModelConfig) -> None:
    platforms = _PLATFORMS.get(config.backend)
    if platforms is not None and config.platform not in platforms:
        raise BadConfig(f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}")


def check_max_batch_size(config: ModelConfig) -> None:
    if config.max_batch_size < 0:
        raise BadConfig(f"'max_batch_size' must be non-negative value for {config.name}")


def check_preferred_batch_sizes(config: ModelConfig) -> None:
    for size in config.dynamic_batching.preferred_batch_size:
        if size <= 0:
            raise BadConfig(f"dynamic batching preferred size must be positive for {config.name}")
        if size > config.max_batch_size:
            raise BadConfig(f"dynamic batching preferred size must be <= max batch size for {config.name}")


def check_priority_levels(config: ModelConfig) -> None:
    batching = config.dynamic_batching
    levels = batching.priority_levels
    # Without levels, the default level and the policies of levels have no effect.
    if not levels:
        return
    if not 1 <= batching.default_priority_level <= levels:
        raise BadConfig(f"default priority level must be in range [1, {levels}] for {config.name}")
    if any(not 1 <= level <= levels for level in batching.priority_queue_policy):
        raise BadConfig(f"priority queue policy must have priority level in range [1, {levels}] for {config.name}")


def check_preserve_ordering(config: ModelConfig) -> None:
    """Refuse settings that let requests overtake each other when the order must be preserved."""
    batching = config.dynamic_batching
    if not batching.preserve_ordering:
        return
    if batching.priority_levels > 1:
        raise BadConfig(f"Only one priority level is allowed when 'preserve_ordering' is true for {config.name}")
    for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values()):
        # Without a timeout its action has no effect.
        if policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY:
            raise BadConfig(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {config.name}"
            )


def check_scheduling_of_ensembles(config: ModelConfig) -> None:
    """Check that ensembles, and only ensembles, have steps."""
    if config.HasField("ensemble_scheduling"):
        if config.platform != "ensemble":
            raise BadConfig(
                f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble"
            )
        check_ensemble(config)
    elif config.platform == "ensemble":
        raise BadConfig(f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble")


def check_response_cache(config: ModelConfig) -> None:
    if config.response_cache.enable and config.model_transaction_policy.decoupled:
        raise BadConfig(
            f"Response Cache does not currently support model {config.name} with 'decoupled' transaction "
            "policy. Please disable the response cache."
        )


def check_model_metrics(config: ModelConfig) -> None:
    for control in config.model_metrics.metric_control:
        if not control.HasField("metric_identifier"):
            raise BadConfig("metric control must specify 'metric_identifier'")
        if not control.metric_identifier.family:
            raise BadConfig("metric identifier must specify non-empty 'family'")
        if not control.HasField("histogram_options"):
            raise BadConfig("metric control must specify 'histogram_options'")
        if not control.histogram_options.buckets:
            raise BadConfig("histogram options must specify non-empty 'buckets'")


def check_paths(config: ModelConfig) -> None:
    """Refuse file names that point outside the model's folder. A client may have sent the configuration.

    This checks names only: code that opens a file must check symbolic links as well. Label files are checked
    where the model's folder is known, because Triton's text shows the whole path.
    """
    # Each path is relative to a folder of the model: a version's folder, `warmup` or `initial_state`.
    paths = [config.default_model_filename, *config.cc_model_filenames.values()]
    paths += [given.input_data_file for sample in config.model_warmup for given in sample.inputs.values()]
    paths += [initial.data_file for state in config.sequence_batching.state for initial in state.initial_state]
    for path in paths:
        if _is_outside(posixpath.join("folder", path)):
            raise Unsupported(f"file path '{path}' in model '{config.name}' is outside model directory")


def _is_outside(path: str) -> bool:
    return "\0" in path or posixpath.isabs(path) or posixpath.normpath(path).split("/", 1)[0] == ".."


def check_instance_groups(config: ModelConfig, gpus: UsableGpus) -> None:
    if config.HasField("ensemble_scheduling"):
        return
    if not config.instance_group:
        raise BadConfig(f"must specify one or more 'instance group's for {config.name}")
    for group in config.instance_group:
        _check_devices(config.name, group, gpus)
        _check_profiles(config, group)
    if all(group.passive for group in config.instance_group):  # requests would wait without end; Triton crashes
        raise BadConfig(f"model '{config.name}' has only passive instances, which no request reaches")


def _check_devices(model: str, group: ModelInstanceGroup, gpus: UsableGpus) -> None:
    of_model = f"instance group {group.name} of model {model}"
    # A protobuf enum field may contain a number that has no name; the text is Triton's.
    if group.kind == ModelInstanceGroup.KIND_AUTO or group.kind not in ModelInstanceGroup.Kind.values():
        raise InternalError(f"{of_model} has unexpected kind KIND_AUTO")
    kind = ModelInstanceGroup.Kind.Name(group.kind)
    if group.kind != ModelInstanceGroup.KIND_GPU:
        if group.gpus:
            raise BadConfig(f"{of_model} has kind {kind} but specifies one or more GPUs")
        return
    if not group.gpus:
        reason = "specifies no GPUs" if gpus.ids else "no GPUs are available"
        raise BadConfig(f"{of_model} has kind KIND_GPU but {reason}")
    for gpu in group.gpus:
        if gpu not in gpus.ids:
            raise BadConfig(
                f"{of_model} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum "
                f"required CUDA compute compatibility of {gpus.least_capability:f} are: "
                + ", ".join(map(str, gpus.ids))
            )


def _check_profiles(config: ModelConfig, group: ModelInstanceGroup) -> None:
    of_model = f"instance group {group.name} of model {config.name} and platform {config.platform}"
    if group.profile and config.platform != "tensorrt_plan":
        # The missing space before "specifies" is Triton's.
        raise BadConfig(f"{of_model}specifies profile field which is only supported for TensorRT models")
    for profile in group.profile:
        if not (profile.isascii() and profile.isdigit()):
            raise BadConfig(
                f"{of_model} specifies invalid profile {profile}. The field should contain the string "
                "representation of a non-negative integer."
            )


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

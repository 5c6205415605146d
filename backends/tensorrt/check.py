"""Checks that a model's configuration agrees with its engine. Pure.

Rules and texts are those of Triton's TensorRT backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.batch_input import batch_inputs_of
from backends.reshape import tensor_specs
from backends.tensorrt.signature import DATATYPES as ENGINE_TYPES
from backends.tensorrt.signature import shape_text
from backends.worker.sequences.sequence_config import sequence_inputs, state_outputs
from kernel.errors import InternalError, InvalidArgument, Unsupported
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Config
    from backends.reshape import TensorShapes
    from backends.tensorrt.signature import EngineSignature, EngineTensor


def check_agreement(config: Config, signature: EngineSignature, instance_name: str) -> None:
    """Raise an error for the first contradiction between configuration and engine.

    `instance_name` is for the texts. Raises `InvalidArgument`, `InternalError`, or `Unsupported` for tensors that no
    client can send.
    """
    model = str(config["name"])
    marked = _marked_shape_tensors(config)
    for tensor in signature.tensors.values():
        if tensor.special_format:
            raise Unsupported(
                f"{tensor.kind} '{tensor.name}' of model '{model}' has the memory format {tensor.special_format}; this "
                "server supports engines whose inputs and outputs have the format LINEAR: build the engine without "
                "--inputIOFormats and --outputIOFormats"
            )
    inputs, outputs = tensor_specs(config, "input"), tensor_specs(config, "output")
    if len(inputs) > len(signature.inputs):
        raise InvalidArgument(
            f"unable to load model '{model}', configuration expects {len(inputs)} inputs, model provides at most "
            f"{len(signature.inputs)}"
        )
    for kind, specs, allowed in (("input", inputs, signature.inputs), ("output", outputs, signature.outputs)):
        for spec in specs.values():
            if spec.name not in allowed:
                raise _unexpected(kind, spec.name, allowed)
            _check_kind_of_tensor(model, kind, spec, allowed[spec.name], spec.name in marked)
    for spec in (*inputs.values(), *outputs.values()):
        _check_tensor(model, spec, signature.tensors[spec.name], instance_name)
    _check_server_made(config, signature, instance_name)
    _check_completeness(config, signature, instance_name)


def _marked_shape_tensors(config: Config) -> set[str]:
    entries = [*config.get("input", []), *config.get("output", [])]
    return {str(entry["name"]) for entry in entries if entry.get("is_shape_tensor", False)}


def _unexpected(kind: str, name: str, allowed: dict[str, EngineTensor]) -> InvalidArgument:
    return InvalidArgument(f"unexpected inference {kind} '{name}', allowed {kind}s are: {', '.join(sorted(allowed))}")


def _check_kind_of_tensor(model: str, kind: str, spec: TensorShapes, tensor: EngineTensor, marked: bool) -> None:
    if spec.datatype not in ENGINE_TYPES.values():
        # The missing space is Triton's.
        raise InternalError(
            f"unsupported datatype{DATATYPES[spec.datatype].config_name} for {kind} '{spec.name}' for model '{model}'"
        )
    if tensor.is_shape_tensor and not marked:
        raise InternalError(
            f"{kind} '{spec.name}' for model '{model}' is a shape tensor but the model configuration doesn't mark it "
            "as a shape tensor."
        )
    if marked and not tensor.is_shape_tensor:
        raise InternalError(
            f"{kind} '{spec.name}' for model '{model}' is incorrectly marked as a shape tensor in the model "
            "configuration."
        )


# ---- tensors of requests --------------------------------------------------------------------


def _check_tensor(model: str, spec: TensorShapes, tensor: EngineTensor, instance_name: str) -> None:
    _check_datatype(tensor, spec.datatype, instance_name)
    if tensor.is_shape_tensor:
        _check_shape_tensor(model, spec, tensor)
    elif spec.ragged:
        if len(tensor.dims) != 1 or tensor.dims != spec.model_dims[:1]:
            raise InvalidArgument(
                f"model '{model}', tensor '{spec.name}': for the model to support ragged input, the engine shape is: "
                f"{shape_text(tensor.dims)} while the model config shape is: {shape_text(spec.model_dims)}"
            )
    elif spec.shaped_like is None:
        _check_dims(model, spec, tensor)


def _check_datatype(tensor: EngineTensor, expected: str, instance_name: str) -> None:
    if tensor.datatype != expected:
        raise InvalidArgument(
            f"unexpected datatype TYPE_{tensor.datatype} for inference {tensor.kind} '{tensor.name}', expecting "
            f"{DATATYPES[expected].config_name} for {instance_name}"
        )


def _check_shape_tensor(model: str, spec: TensorShapes, tensor: EngineTensor) -> None:
    if len(tensor.dims) > 1:
        raise InternalError(
            f"unable to load model '{model}', shape binding '{spec.name}' can only be 0-d or 1-D tensor, got "
            f"{shape_text(tensor.dims)}"
        )
    expected = tuple(dim - int(spec.batched) for dim in tensor.dims) or (1,)
    if spec.model_dims != expected:
        raise InternalError(
            f"unable to load model '{model}', binding '{spec.name}' shape expected by framework "
            f"{shape_text(tensor.dims)} doesn't match model configuration shape {shape_text(spec.model_dims)}"
        )


def _check_dims(model: str, spec: TensorShapes, tensor: EngineTensor) -> None:
    """Compare dimensions: where both say a size, it must be the same one."""
    if spec.batched and not tensor.dims:
        raise InvalidArgument(
            f"model '{model}', tensor '{spec.name}': for the model to support batching the shape should have at "
            f"least 1 dimension; but shape expected by the model is {shape_text(tensor.dims)}"
        )
    configured = (-1, *spec.model_dims) if spec.batched else spec.model_dims
    if _compatible(tensor.dims, configured):
        return
    whole = (
        "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete "
        if spec.batched
        else ""
    )
    raise InvalidArgument(
        f"model '{model}', tensor '{spec.name}': the model expects {len(tensor.dims)} dimensions (shape "
        f"{shape_text(tensor.dims)}) but the model configuration specifies {len(configured)} dimensions "
        f"({whole}shape {shape_text(configured)})"
    )


def _compatible(engine: Sequence[int], configured: Sequence[int]) -> bool:
    return len(engine) == len(configured) and all(
        -1 in (mine, theirs) or mine == theirs for mine, theirs in zip(engine, configured, strict=True)
    )


# ---- tensors that the server makes ----------------------------------------------------------


def _check_server_made(config: Config, signature: EngineSignature, instance_name: str) -> None:
    """Check sequence controls, states and batch inputs."""
    model = str(config["name"])
    for spec in sequence_inputs(config):
        tensor = _found(spec.name, "input", signature.inputs, instance_name)
        _check_datatype(tensor, spec.datatype, instance_name)
        if spec.name in _states(config, "input_name"):
            _check_dims(model, spec, tensor)
        else:
            _check_control(model, spec, tensor)
    for spec in state_outputs(config):
        tensor = _found(spec.name, "output", signature.outputs, instance_name)
        _check_datatype(tensor, spec.datatype, instance_name)
        _check_dims(model, spec, tensor)
    for batch_input in batch_inputs_of(config):
        for name in batch_input.target_names:
            _check_datatype(_found(name, "input", signature.inputs, instance_name), batch_input.datatype, instance_name)


def _found(name: str, kind: str, allowed: dict[str, EngineTensor], instance_name: str) -> EngineTensor:
    if name not in allowed:
        raise InvalidArgument(f"{kind} '{name}' not found for {instance_name}")
    return allowed[name]


def _states(config: Config, key: str) -> set[str]:
    return {str(state[key]) for state in config.get("sequence_batching", {}).get("state", [])}


def _check_control(model: str, spec: TensorShapes, tensor: EngineTensor) -> None:
    if not tensor.is_dynamic:
        _check_dims(model, spec, tensor)
        return
    first = -1 if spec.batched else 1
    if tensor.dims[0] != first:
        reason = f"expects the first dimension to be {first} but the model specified {tensor.dims[0]}"
    elif any(dim != 1 for dim in tensor.dims[1:]):
        reason = (
            "expects all dimensions (conditionally first) to be 1 but the model specified shape "
            f"{shape_text(tensor.dims)}"
        )
    else:
        return
    raise InvalidArgument(
        f"unexpected shape {shape_text(tensor.dims)} for control input '{spec.name}' for model {model}: {reason}"
    )


def _check_completeness(config: Config, signature: EngineSignature, instance_name: str) -> None:
    """Each tensor of the engine needs an entry: TensorRT has no optional inputs, and writes all outputs."""
    names = {*tensor_specs(config, "input"), *tensor_specs(config, "output")}
    names |= {spec.name for spec in (*sequence_inputs(config), *state_outputs(config))}
    names |= {name for batch_input in batch_inputs_of(config) for name in batch_input.target_names}
    for tensor in signature.tensors.values():
        if tensor.name not in names:
            raise InvalidArgument(f"expected configuration for {tensor.kind} '{tensor.name}' for {instance_name}")

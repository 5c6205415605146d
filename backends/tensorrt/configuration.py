"""Completes a model's configuration from its engine: batching, and what tensors miss. Pure.

Rules and texts are those of Triton's TensorRT backend.

Checks that a model's configuration agrees with its engine. Pure.

Rules and texts are those of Triton's TensorRT backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.batch_tensors import batch_inputs_of
from backends.reshape import tensor_specs
from backends.tensorrt.profiles import profiles_of_groups
from backends.tensorrt.signature import DATATYPES as ENGINE_TYPES
from backends.tensorrt.signature import shape_text
from backends.worker.sequence_config import sequence_inputs, state_outputs
from kernel.errors import InternalError, InvalidArgument, Unsupported
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Config
    from backends.reshape import TensorShapes
    from backends.tensorrt.signature import EngineSignature, EngineTensor, Profile


def autofill(config: Config, signature: EngineSignature) -> Config:
    """Return a new configuration with missing batching, inputs, outputs, datatypes and dimensions filled in.

    Raises `InternalError` if configuration and engine disagree about batching, `InvalidArgument` for tensors that the
    engine does not have, and `Unsupported` for a tensor type that no client can send.
    """
    filled = dict(config)
    filled["max_batch_size"] = max_batch_size = _max_batch_size(config, signature)
    if max_batch_size > 1 and not config.keys() & {"sequence_batching", "dynamic_batching"}:
        filled["dynamic_batching"] = {}
    own = _names_filled_in_by_the_server(config)
    for key, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        entries = {name: _entry(tensor, max_batch_size > 0) for name, tensor in tensors.items() if name not in own}
        filled[key] = _merged(config.get(key, []), entries) or list(entries.values())
    return filled


def _names_filled_in_by_the_server(config: Config) -> set[str]:
    """Return the tensors that requests do not have: batch inputs, sequence controls and states."""
    sequences = config.get("sequence_batching", {})
    names = {name for entry in config.get("batch_input", []) for name in entry.get("target_name", [])}
    names |= {str(entry["name"]) for entry in sequences.get("control_input", [])}
    for state in sequences.get("state", []):
        names |= {str(state["input_name"]), str(state["output_name"])}
    return names


# ---- batching -------------------------------------------------------------------------------


def _max_batch_size(config: Config, signature: EngineSignature) -> int:
    name, configured = config["name"], int(config.get("max_batch_size", 0))
    hint, given = _batching_hint(config, signature)
    profiles = [signature.profiles[index] for index in profiles_of_groups(config, len(signature.profiles))]
    supported = max(_supported_batch_size(signature, profile) for profile in profiles)
    if hint and not supported:
        raise InternalError(
            f"autofill failed for model '{name}': model tensor shape configuration hints for dynamic batching "
            "but the underlying engine doesn't support batching."
        )
    if given and not hint:
        supported = 0
    if configured > supported:
        raise InternalError(
            f"autofill failed for model '{name}': configuration specified max-batch {configured} but TensorRT engine "
            f"only supports max-batch {supported}"
        )
    return configured or supported


def _supported_batch_size(signature: EngineSignature, profile: Profile) -> int:
    """Return the most rows that the profile supports: 0 if the first dimension of an input is fixed, or if all inputs
    are shape tensors, which have no rows."""
    if all(tensor.is_shape_tensor for tensor in signature.inputs.values()):
        return 0
    sizes: list[int] = []
    for name, tensor in signature.inputs.items():
        if tensor.is_shape_tensor:
            sizes += profile.values[name].maximum[:1] if name in profile.values else ()
        elif tensor.dims[:1] != (-1,):
            return 0
        else:
            sizes.append(profile.dims[name].maximum[0])
    return min(sizes, default=0)


def _batching_hint(config: Config, signature: EngineSignature) -> tuple[bool, bool]:
    """Return whether tensors of the configuration have one dimension fewer than those of the engine, and whether any
    has dimensions at all. Raises `InternalError` if they contradict one another."""
    hints = []
    for key, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        for entry in config.get(key, []):
            if entry.get("allow_ragged_batch", False):
                return True, True
            tensor = tensors.get(entry["name"])
            if tensor is None:
                raise _unexpected_entry(key, entry["name"], tensors)
            dims = _configured_dims(entry)
            if dims:
                hints.append(_is_one_shorter(tensor, dims))
    if any(hints) and not all(hints):
        raise InternalError(
            f"unable to autofill for '{config['name']}', model tensor configurations are contradicting each other in "
            "terms of whether batching is supported"
        )
    return any(hints), bool(hints)


def _unexpected_entry(kind: str, name: str, tensors: dict[str, EngineTensor]) -> InvalidArgument:
    return InvalidArgument(f"unexpected inference {kind} '{name}', allowed {kind}s are: {', '.join(sorted(tensors))}")


def _is_one_shorter(tensor: EngineTensor, dims: Sequence[int]) -> bool:
    if tensor.is_shape_tensor:
        return tensor.dims[:1] == (dims[0] + 1,)
    return len(tensor.dims) == len(dims) + 1


def _configured_dims(entry: Config) -> list[int]:
    reshape = entry.get("reshape")
    dims = entry.get("dims", []) if reshape is None else reshape.get("shape", [])
    return [int(dim) for dim in dims]


# ---- tensors --------------------------------------------------------------------------------


def _merged(given: Sequence[Config], complete: dict[str, Config]) -> list[Config]:
    """Return the configured entries with what they miss: the datatype, or the dimensions."""
    merged = []
    for entry in given:
        found = complete.get(entry["name"], {})
        new = dict(entry)
        if new.get("data_type", "TYPE_INVALID") in ("", "TYPE_INVALID") and "data_type" in found:
            new["data_type"] = found["data_type"]
        if not new.get("dims") and "dims" in found:
            new["dims"] = found["dims"]
            if "reshape" in found and "reshape" not in new:
                new["reshape"] = found["reshape"]
        merged.append(new)
    return merged


def _entry(tensor: EngineTensor, batched: bool) -> Config:
    """Return the configuration of an engine's tensor.

    A shape tensor of a model that batches has the number of rows as its first value, which clients leave out.
    """
    entry: dict[str, Any] = {"name": tensor.name, "data_type": DATATYPES[tensor.datatype].config_name}
    if tensor.is_shape_tensor:
        entry["dims"] = [dim - 1 if batched else dim for dim in tensor.dims[:1]] or [1]
        entry["is_shape_tensor"] = True
        return entry
    dims = list(tensor.dims[1:] if batched else tensor.dims)
    entry["dims"] = dims or [1]
    if not dims:
        entry["reshape"] = {"shape": []}  # a configuration cannot have scalars
    return entry


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

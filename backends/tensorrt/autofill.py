"""Completes a model's configuration from its engine: batching, and what tensors miss. Pure.

Rules and texts are those of Triton's TensorRT backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.tensorrt.profiles import profiles_of_groups
from kernel.errors import InternalError, InvalidArgument
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Config
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
                raise _unexpected(key, entry["name"], tensors)
            dims = _configured_dims(entry)
            if dims:
                hints.append(_is_one_shorter(tensor, dims))
    if any(hints) and not all(hints):
        raise InternalError(
            f"unable to autofill for '{config['name']}', model tensor configurations are contradicting each other in "
            "terms of whether batching is supported"
        )
    return any(hints), bool(hints)


def _unexpected(kind: str, name: str, tensors: dict[str, EngineTensor]) -> InvalidArgument:
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

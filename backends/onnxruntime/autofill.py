"""Completes a model's configuration from its file: tensors, and whether the model can batch. Pure.

The rules are those of Triton's ONNX Runtime backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel.errors import InvalidArgument, Unsupported
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from backends.base import Config
    from backends.onnxruntime.signature import OnnxSignature, OnnxTensor

#: The backend's setting for models that can batch and have no max_batch_size in their configuration.
DEFAULT_MAX_BATCH_SIZE = "default-max-batch-size"
_TRITONS_DEFAULT = "4"


def default_max_batch_size(backend_config: Mapping[str, str]) -> int:
    """Return the max_batch_size for models without one, from the command line. Raises `InvalidArgument`."""
    value = backend_config.get(DEFAULT_MAX_BATCH_SIZE, _TRITONS_DEFAULT)
    try:
        return int(value)
    except ValueError:
        raise InvalidArgument(f"failed to convert '{value}' to integral number") from None


def is_complete(config: Config) -> bool:
    """Return whether the configuration has inputs and outputs. Then nothing is filled in, not even max_batch_size."""
    return bool(config.get("input") or config.get("batch_input")) and bool(config.get("output"))


def autofill(config: Config, signature: OnnxSignature, default_batch_size: int) -> Config:
    """Return a new configuration with missing batching, inputs and outputs filled in.

    `default_batch_size` is the max_batch_size of a model that can batch and has none in its configuration. Raises
    `InvalidArgument` if the configuration has a max_batch_size and the model cannot batch, or the file leaves the rank
    of a missing tensor open, and `Unsupported` for a tensor type that no client can send.
    """
    filled = dict(config)
    filled["max_batch_size"] = max_batch_size = _max_batch_size(config, signature, default_batch_size)
    if max_batch_size > 1 and not config.keys() & {"sequence_batching", "dynamic_batching"}:
        filled["dynamic_batching"] = {}
    if not config.get("input") and not config.get("batch_input"):
        filled["input"] = _entries(config["name"], "input", signature.inputs.values(), max_batch_size > 0)
    if not config.get("output"):
        filled["output"] = _entries(config["name"], "output", signature.outputs.values(), max_batch_size > 0)
    return filled


def _max_batch_size(config: Config, signature: OnnxSignature, default: int) -> int:
    configured = int(config.get("max_batch_size", 0))
    tensors = (*signature.inputs.values(), *signature.outputs.values())
    if all(tensor.dims[:1] == (-1,) for tensor in tensors):
        return configured or max(default, 0)
    if configured and all(tensor.dims[:1] == (-1,) or tensor.any_rank for tensor in tensors):
        return configured  # the file does not contradict it
    if configured:
        raise InvalidArgument(
            f"autofill failed for model '{config['name']}': model does not support batching while "
            "non-zero max_batch_size is specified"
        )
    return 0


def _entries(model: str, what: str, tensors: Iterable[OnnxTensor], batched: bool) -> list[dict[str, Any]]:
    return [_entry(model, what, tensor, batched) for tensor in tensors]


def _entry(model: str, what: str, tensor: OnnxTensor, batched: bool) -> dict[str, Any]:
    if tensor.datatype is None:
        raise Unsupported(f"unsupported datatype {tensor.onnx_type} for I/O '{tensor.name}'")
    if tensor.any_rank:
        raise InvalidArgument(
            f"autofill failed for model '{model}': the file does not say how many dimensions '{tensor.name}' has; "
            f'write them into config.pbtxt, such as {what} [ {{ name: "{tensor.name}" data_type: '
            f"{DATATYPES[tensor.datatype].config_name} dims: [ -1 ] }} ]"
        )
    dims = list(tensor.dims[1:] if batched else tensor.dims)
    entry: dict[str, Any] = {
        "name": tensor.name,
        "data_type": DATATYPES[tensor.datatype].config_name,
        "dims": dims or [1],
    }
    # A configuration cannot have scalars. Clients send one element; the model gets one number per row.
    if not dims and batched:
        entry["reshape"] = {"shape": []}
    return entry

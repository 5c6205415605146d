"""Completes a model's configuration from its file: tensors, and whether the model can batch. Pure.

The rules come from Triton's ONNX Runtime backend.

Checks, when a model is loaded, that its configuration agrees with its file. Pure.

Rules and texts are those of Triton's ONNX Runtime backend (onnxruntime.cc, onnxruntime_utils.cc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.reshape import tensor_specs
from kernel.errors import InternalError, InvalidArgument, Unsupported
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from backends.base import Config
    from backends.onnxruntime.signature import OnnxSignature, OnnxTensor
    from backends.reshape import TensorShapes

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


def check_agreement(config: Config, signature: OnnxSignature) -> None:
    """Raise an error for the first contradiction between configuration and file: `InvalidArgument`, or
    `InternalError` for a missing control input."""
    controls = _check_controls(config, signature)
    states = config.get("sequence_batching", {}).get("state", [])
    inputs = tensor_specs(config, "input").values()
    expected = sum(not spec.optional for spec in inputs)
    expected += len(config.get("batch_input", [])) + controls + len(states)
    if len(signature.inputs) != expected:
        raise InvalidArgument(
            f"unable to load model '{config['name']}', configuration expects {expected} inputs, "
            f"model provides {len(signature.inputs)}"
        )
    allowed = {**signature.inputs, **signature.initializers}
    for spec in inputs:
        _check_input(config["name"], spec, allowed)
    for spec in tensor_specs(config, "output").values():
        _check_output(config["name"], spec, signature.outputs)
    for state in states:
        found = _find(state["output_name"], signature.outputs, "output")
        _check_datatype(config["name"], found, state["data_type"], "output state")


# ---- inputs and outputs ---------------------------------------------------------------------


def _check_input(model: str, spec: TensorShapes, allowed: dict[str, OnnxTensor]) -> None:
    if spec.optional and spec.batched:
        raise InvalidArgument(
            f"unable to load model '{model}', optional input '{spec.name}' is not supported for models "
            "that support batching"
        )
    found = _find(spec.name, allowed, "input")
    _check_datatype(model, found, DATATYPES[spec.datatype].config_name, "input")
    if not spec.ragged:
        _check_dims(model, found, spec, exact=False)
    elif found.dims != (-1,):
        raise InvalidArgument(
            f"unable to load model '{model}', configuration expects model provides input with shape [-1]  "
            f"for ragged input '{spec.name}', model provides {_shape(found.dims)}"
        )


def _check_output(model: str, spec: TensorShapes, allowed: dict[str, OnnxTensor]) -> None:
    found = _find(spec.name, allowed, "output")
    _check_datatype(model, found, DATATYPES[spec.datatype].config_name, "output")
    if spec.shaped_like is None:
        _check_dims(model, found, spec, exact=True)


def _find(name: str, allowed: dict[str, OnnxTensor], what: str) -> OnnxTensor:
    if name not in allowed:
        raise InvalidArgument(
            f"unexpected inference {what} '{name}', allowed {what}s are: {', '.join(sorted(allowed))}"
        )
    return allowed[name]


def _check_datatype(model: str, found: OnnxTensor, config_name: str, what: str) -> None:
    provided = found.datatype or "INVALID"
    if provided not in DATATYPES or DATATYPES[provided].config_name != config_name:
        raise InvalidArgument(
            f"unable to load model '{model}', configuration expects datatype {config_name} for {what} "
            f"'{found.name}', model provides TYPE_{provided}"
        )


def _check_dims(model: str, found: OnnxTensor, spec: TensorShapes, *, exact: bool) -> None:
    """Compare dimensions. `exact` requires equality; otherwise the configuration may fix the model's variable ones.

    Where the file leaves the rank open, the configuration is believed.
    """
    if found.any_rank:
        return
    if not found.dims and not spec.batched:
        _check_scalar(model, spec)
        return
    if spec.batched and found.dims[:1] != (-1,):
        raise InvalidArgument(
            f"model '{model}', tensor '{spec.name}': for the model to support batching the shape should have "
            "at least 1 dimension and the first dimension must be -1; but shape expected by the model is "
            f"{_shape(found.dims)}"
        )
    configured = (-1, *spec.model_dims) if spec.batched else spec.model_dims
    if _compatible(found.dims, configured, exact=exact):
        return
    reason = (
        "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
        "making complete shape "
        if spec.batched
        else "shape "
    )
    raise InvalidArgument(
        f"model '{model}', tensor '{spec.name}': the model expects {len(found.dims)} dimensions "
        f"(shape {_shape(found.dims)}) but the model configuration specifies {len(configured)} dimensions "
        f"({reason}{_shape(configured)})"
    )


def _compatible(model_dims: Sequence[int], configured: Sequence[int], *, exact: bool) -> bool:
    return len(model_dims) == len(configured) and all(
        model_dim == dim or (model_dim == -1 and not exact)
        for model_dim, dim in zip(model_dims, configured, strict=True)
    )


def _check_scalar(model: str, spec: TensorShapes) -> None:
    if any(dim != 1 for dim in spec.model_dims):
        raise InvalidArgument(
            f"unable to load model '{model}', scalar tensor '{spec.name}', should only provide 1 in the "
            "model configuration when the model doesn't support batching. Model configuration provided: "
            f"{_shape(spec.model_dims)}."
        )


# ---- sequence controls ----------------------------------------------------------------------


def _check_controls(config: Config, signature: OnnxSignature) -> int:
    """Check the model's inputs for sequence controls, and return their number."""
    count = 0
    batched = int(config.get("max_batch_size", 0)) > 0
    for name, config_name in _controls(config):
        count += 1
        found = signature.inputs.get(name)
        if found is None:
            raise InternalError(
                f"configuration specified sequence control '{name}', but model does not provide that input"
            )
        dims = found.dims[1:] if batched else found.dims
        prefix = f"unable to load model '{config['name']}', sequence control '{name}'"
        if dims != (1,):
            raise InvalidArgument(f"{prefix} in model has dims {_shape(dims)} but dims [1] is expected")
        if found.datatype is None or DATATYPES[found.datatype].config_name != config_name:
            raise InvalidArgument(
                f"{prefix}, the model expects data-type {found.onnx_name} but the model configuration "
                f"specifies data-type {config_name}"
            )
    return count


def _controls(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the input's name and the configuration's datatype of each sequence control."""
    for control_input in config.get("sequence_batching", {}).get("control_input", []):
        for control in control_input.get("control", []):
            yield control_input["name"], _control_datatype(control)


def _control_datatype(control: dict[str, Any]) -> str:
    if control.get("int32_false_true"):
        return "TYPE_INT32"
    if control.get("fp32_false_true"):
        return "TYPE_FP32"
    if control.get("bool_false_true"):
        return "TYPE_BOOL"
    return str(control.get("data_type", "TYPE_INVALID"))


def _shape(dims: Iterable[int]) -> str:
    return "[" + ",".join(str(dim) for dim in dims) + "]"

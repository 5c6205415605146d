"""The control tensors and the implicit state of a configuration's `sequence_batching`. Pure, except for initial states
in files.

Sources of the rules: sequence_batch_scheduler.cc and sequence_state.cc of Triton's core.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from backends.reshape import TensorShapes, tensor_specs
from kernel.errors import InternalError, InvalidArgument
from shm.datatypes import BY_CONFIG_NAME, DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from backends.base import Config

#: The folder of files with initial states, in the model's folder.
INITIAL_STATE_FOLDER = "initial_state"

#: The lists of values for false and true, with their datatypes.
_FALSE_TRUE = {"int32_false_true": ("INT32", "<i"), "fp32_false_true": ("FP32", "<f"), "bool_false_true": ("BOOL", "?")}

_MASK_64, _MASK_32 = (1 << 64) - 1, (1 << 32) - 1

#: The bits of an integer that a correlation id keeps.
_MASKS = {"UINT64": _MASK_64, "INT64": _MASK_64, "UINT32": _MASK_32, "INT32": _MASK_32}


class FlagControl(msgspec.Struct, frozen=True):
    """A control tensor for START, END or READY."""

    name: str
    #: `CONTROL_SEQUENCE_START`, `CONTROL_SEQUENCE_END` or `CONTROL_SEQUENCE_READY`.
    kind: str
    datatype: str
    #: The tensor's bytes for false and for true.
    values: tuple[bytes, bytes]


class CorrelationIdControl(msgspec.Struct, frozen=True):
    """The control tensor with the correlation id."""

    name: str
    datatype: str

    def value(self, correlation_id: int | str) -> bytes:
        """Return the tensor's bytes. Integers lose what is too long for the datatype, as in Triton.

        A text becomes a number by its digest, which is the same in each process and each run.
        """
        if self.datatype == "BYTES":
            text = str(correlation_id).encode()
            return struct.pack("<I", len(text)) + text
        number = correlation_id if isinstance(correlation_id, int) else _number_of(correlation_id)
        size = DATATYPES[self.datatype].byte_size
        return (number & _MASKS[self.datatype]).to_bytes(size, "little")


def _number_of(text: str) -> int:
    """Return 64 bits of a digest of an id; 0 for "", which is not an id."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") if text else 0


class StateTensor(msgspec.Struct, frozen=True):
    """An output of the model that is an input of the sequence's next request."""

    input_name: str
    output_name: str
    datatype: str
    #: With the batch dimension, if the model batches; -1 for any size.
    shape: tuple[int, ...]
    initial_shape: tuple[int, ...]
    initial_data: bytes
    #: The model may change the input in place; that is then the new state, unless it returns the output.
    same_buffer: bool = False
    #: Whether clients get the output.
    visible: bool = False


def sequence_batching_of(config: Config) -> Mapping[str, Any] | None:
    """Return the configuration's `sequence_batching`, or None."""
    found: Mapping[str, Any] | None = config.get("sequence_batching")
    return found


def flag_controls(config: Config) -> list[FlagControl]:
    """Return the control tensors for START, END and READY."""
    return [_flag(name, control) for name, control in _controls(config) if not _is_correlation_id(control)]


def correlation_id_control(config: Config) -> CorrelationIdControl | None:
    """Return the control tensor with the correlation id, or None if there is none."""
    for name, control in _controls(config):
        if _is_correlation_id(control):
            return CorrelationIdControl(name, BY_CONFIG_NAME[control["data_type"]].name)
    return None


def _controls(config: Config) -> list[tuple[str, Mapping[str, Any]]]:
    batching = sequence_batching_of(config) or {}
    return [(each["name"], control) for each in batching.get("control_input", []) for control in each["control"]]


def _is_correlation_id(control: Mapping[str, Any]) -> bool:
    return bool(control.get("kind") == "CONTROL_SEQUENCE_CORRID")


def _flag(name: str, control: Mapping[str, Any]) -> FlagControl:
    for key, (datatype, code) in _FALSE_TRUE.items():
        if control.get(key):
            false, true = control[key]
            kind = control.get("kind", "CONTROL_SEQUENCE_START")  # the value 0, which JSON may leave out
            return FlagControl(name, kind, datatype, (struct.pack(code, false), struct.pack(code, true)))
    raise AssertionError(f"control '{name}' has no values, although the configuration was checked")


def sequence_inputs(config: Config) -> list[TensorShapes]:
    """Return the inputs that the model has because of `sequence_batching`: control tensors, then states."""
    batched = int(config.get("max_batch_size", 0)) > 0
    controls: list[FlagControl | CorrelationIdControl] = [*flag_controls(config)]
    if (correlation_id := correlation_id_control(config)) is not None:
        controls.append(correlation_id)
    specs = [TensorShapes(control.name, control.datatype, (1,), batched=batched) for control in controls]
    return specs + [_state_shapes(state, state["input_name"], batched) for state in _states(config)]


def state_outputs(config: Config) -> list[TensorShapes]:
    """Return the outputs that the model has because of implicit state."""
    batched = int(config.get("max_batch_size", 0)) > 0
    return [_state_shapes(state, state["output_name"], batched) for state in _states(config)]


def all_inputs(config: Config) -> dict[str, TensorShapes]:
    """Return name → input of the model: of its configuration, and what it has because of sequences."""
    return {**tensor_specs(config, "input"), **{spec.name: spec for spec in sequence_inputs(config)}}


def all_outputs(config: Config) -> dict[str, TensorShapes]:
    """Return name → output of the model: of its implicit state, and of its configuration.

    A state output may also be an output for clients, with `reshape` or another setting.
    """
    return {**{spec.name: spec for spec in state_outputs(config)}, **tensor_specs(config, "output")}


def _states(config: Config) -> Sequence[Mapping[str, Any]]:
    states: Sequence[Mapping[str, Any]] = (sequence_batching_of(config) or {}).get("state", [])
    return states


def _state_shapes(state: Mapping[str, Any], name: str, batched: bool) -> TensorShapes:
    return TensorShapes(name, BY_CONFIG_NAME[state["data_type"]].name, _dims(state), batched=batched)


def _dims(entry: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(dim) for dim in entry.get("dims", []))


def state_tensors(config: Config, model_dir: Path) -> list[StateTensor]:
    """Return the implicit state, with its initial values. Reads files of the model's folder.

    Raises `InvalidArgument` for a file of the wrong size, and `InternalError` for one that cannot be read.
    """
    batch = (1,) if int(config.get("max_batch_size", 0)) > 0 else ()
    outputs = {output["name"] for output in config.get("output", [])}
    tensors = []
    for state in _states(config):
        datatype = BY_CONFIG_NAME[state["data_type"]].name
        dims = _dims(state)
        initial = next(iter(state.get("initial_state", [])), None)
        # Triton's rule for a variable dimension without an initial state.
        initial_dims = tuple(1 if dim < 0 else dim for dim in dims) if initial is None else _dims(initial)
        tensors.append(
            StateTensor(
                state["input_name"],
                state["output_name"],
                datatype,
                ((-1,) if batch else ()) + dims,
                batch + initial_dims,
                _initial_data(state["input_name"], datatype, initial_dims, initial or {}, model_dir),
                bool(state.get("use_same_buffer_for_input_output", False)),
                state["output_name"] in outputs,
            )
        )
    return tensors


def zeros(datatype: str, shape: Sequence[int]) -> bytes:
    """Return the bytes of a tensor of zeros or empty strings."""
    return bytes(element_count(shape) * (DATATYPES[datatype].byte_size or 4))


def _initial_data(
    name: str, datatype: str, dims: tuple[int, ...], initial: Mapping[str, Any], model_dir: Path
) -> bytes:
    zero = zeros(datatype, dims)
    file_name = str(initial.get("data_file", ""))
    if not file_name:
        return zero
    folder = (model_dir / INITIAL_STATE_FOLDER).resolve()
    path = (folder / file_name).resolve()
    if not path.is_relative_to(folder):
        raise InvalidArgument(f"initial state file '{file_name}' of state input '{name}' is outside '{folder}'")
    try:
        data: bytes = path.read_bytes()
    except OSError as error:
        raise InternalError(f"failed to open text file for read {path}: {error.strerror}") from error
    if datatype != "BYTES" and len(data) != len(zero):
        raise InvalidArgument(
            f"initial_state setting expects {len(zero)} bytes, but the data provided from {file_name}only has "
            f"{len(data)} bytes"
        )
    return data

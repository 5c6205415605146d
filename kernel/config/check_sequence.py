"""The rules for sequence batching: its control tensors, its two strategies, and its implicit state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import (
    TYPE_INT32,
    TYPE_INT64,
    TYPE_INVALID,
    TYPE_STRING,
    TYPE_UINT32,
    TYPE_UINT64,
    DataType,
    ModelSequenceBatching,
)
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig

_Control = ModelSequenceBatching.Control
_FALSE_TRUE_FIELDS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRID_TYPES = (TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING)


def check_sequence_batching(config: ModelConfig) -> None:
    """Check the sequence batching of a configuration, if it has any. Raises `BadConfig`."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    if config.response_cache.enable:
        raise BadConfig(
            f"Response Cache does not currently support model {config.name} with sequence batching "
            "scheduler. Please disable the response cache."
        )
    for kind in (
        _Control.CONTROL_SEQUENCE_START,
        _Control.CONTROL_SEQUENCE_END,
        _Control.CONTROL_SEQUENCE_READY,
        _Control.CONTROL_SEQUENCE_CORRID,
    ):
        _check_controls_of(kind, batching, config.name)
    _check_oldest(config)
    _check_direct(config)


def _check_controls_of(kind: _Control.Kind, batching: ModelSequenceBatching, model: str) -> None:
    """Check all control tensors for one kind of control. Triton also makes one pass for each kind."""
    name = _Control.Kind.Name(kind)
    seen: set[str] = set()
    found: _Control | None = None
    for control_input in batching.control_input:
        _check_control_name(control_input.name, seen, model)
        seen.add(control_input.name)
        for control in control_input.control:
            if control.kind != kind:
                continue
            if found is not None:
                raise BadConfig(f"sequence batching specifies multiple {name} tensors for {model}")
            found = control
            if kind == _Control.CONTROL_SEQUENCE_CORRID:
                _check_no_false_true(control, name, model)
            else:
                _check_false_true(control, name, model)
    if found is not None and kind == _Control.CONTROL_SEQUENCE_CORRID:
        _check_correlation_id_type(found, model)


def _check_control_name(name: str, seen: set[str], model: str) -> None:
    if not name:
        raise BadConfig(f"sequence batching control tensor must have a name for {model}")
    if name in seen:
        raise BadConfig(
            f"sequence batching control tensor '{name}' is specified for multiple control kinds for {model}"
        )


def _check_false_true(control: _Control, name: str, model: str) -> None:
    given = {field: len(getattr(control, field)) for field in _FALSE_TRUE_FIELDS if getattr(control, field)}
    if not given:
        raise BadConfig(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' for {name} for {model}"
        )
    if len(given) > 1:
        raise BadConfig(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {name} for {model}"
        )
    for field, count in given.items():
        if count != 2:
            raise BadConfig(f"sequence batching control '{field}' must have exactly 2 entries for {name} for {model}")


def _check_no_false_true(control: _Control, name: str, model: str) -> None:
    if any(getattr(control, field) for field in _FALSE_TRUE_FIELDS):
        raise BadConfig(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' for {name} for {model}"
        )


def _check_correlation_id_type(control: _Control, model: str) -> None:
    if control.data_type not in _CORRID_TYPES:
        raise BadConfig(
            f"unexpected data type for control CONTROL_SEQUENCE_CORRID for {model}. Allowed data types are "
            "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        )


def _check_oldest(config: ModelConfig) -> None:
    for size in config.sequence_batching.oldest.preferred_batch_size:
        if size <= 0:
            raise BadConfig(f"sequence batching preferred batch size must be positive for {config.name}")
        if size > config.max_batch_size:
            raise BadConfig(f"sequence batching preferred batch size must be <= max batch size for {config.name}")


def _check_direct(config: ModelConfig) -> None:
    # The text excludes 0, but 0 is the value of an unset field, so Triton accepts it.
    if not 0.0 <= config.sequence_batching.direct.minimum_slot_utilization <= 1.0:
        raise BadConfig(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}")


# ---- implicit state -------------------------------------------------------------------------


def check_states(config: ModelConfig) -> None:
    """Check the implicit state of a configuration, if it has any. Raises `BadConfig`.

    Triton finds these errors when it loads a version (`GenerateInitialStateData` in sequence_batch_scheduler.cc).
    """
    for state in config.sequence_batching.state:
        for field in ("input_name", "output_name"):
            if not getattr(state, field):
                raise BadConfig(f"sequence batching state must specify '{field}' for {config.name}")
        if state.data_type == TYPE_INVALID or state.data_type not in DataType.values():
            raise BadConfig(f"sequence batching state '{state.input_name}' must specify 'data_type' for {config.name}")
        if any(dim < 1 and dim != -1 for dim in state.dims):
            raise BadConfig(
                f"sequence batching state '{state.input_name}' dimension must be integer >= 1, or -1 to indicate a "
                f"variable-size dimension for {config.name}"
            )
        if len(state.initial_state) > 1:
            raise BadConfig(
                f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element. "
                f"Found '{len(state.initial_state)}' elements."
            )
        for initial in state.initial_state:
            _check_initial_state(state, initial)


def _check_initial_state(state: ModelSequenceBatching.State, initial: ModelSequenceBatching.InitialState) -> None:
    name = state.input_name
    if initial.data_type != state.data_type:
        raise BadConfig(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if not initial.name:
        raise BadConfig(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(initial.dims) != len(state.dims):
        raise BadConfig(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    if initial.WhichOneof("state_data") is None:
        # The missing space before the name is Triton's.
        raise BadConfig(f"initial_state setting expects state'{name}' to have state_data set")
    for given, wanted in zip(initial.dims, state.dims, strict=True):
        if given < 0:
            raise BadConfig(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        if wanted not in (-1, given):
            raise BadConfig(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{given} != {wanted}"
            )

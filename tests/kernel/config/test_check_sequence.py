from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.config.check import check_config
from kernel.config.check_sequence import check_states
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.generated.model_config_pb2 import ModelConfig

    Prepare = Callable[..., ModelConfig]


def sequence(more: str) -> str:
    return f'backend: "python" max_batch_size: 4 sequence_batching {{ {more} }}'


def control(fields: str, name: str = "C") -> str:
    return f'control_input [{{ name: "{name}" control [{{ {fields} }}] }}] '


START = "kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1]"
END = "kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1]"
READY = "kind: CONTROL_SEQUENCE_READY "
CORRID = "kind: CONTROL_SEQUENCE_CORRID "
FALSE_TRUE = "'int32_false_true', 'fp32_false_true'"


@pytest.mark.parametrize(
    "more",
    [
        "",
        "direct { minimum_slot_utilization: 1.0 }",
        "direct {}",
        "oldest { max_candidate_sequences: 4 preferred_batch_size: [1, 4] }",
        control(START, "S") + control(END, "E") + control(CORRID + "data_type: TYPE_STRING", "I"),
        control(READY + "bool_false_true: [false, true]"),
        control(READY + "fp32_false_true: [0, 1]"),
        # Triton accepts one tensor for two kinds if it is one control input.
        f'control_input [{{ name: "C" control [{{ {START} }}, {{ {END} }}] }}]',
    ],
)
def test_valid_sequence_batching_passes(more: str, prepared: Prepare) -> None:
    check_config(prepared(sequence(more)), "m")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (control(START, ""), "sequence batching control tensor must have a name for m"),
        (
            control(START) + control(END),
            "sequence batching control tensor 'C' is specified for multiple control kinds for m",
        ),
        (
            control(START) + control(START, "D"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            control(CORRID + "data_type: TYPE_UINT64") + control(CORRID + "data_type: TYPE_UINT64", "D"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_CORRID tensors for m",
        ),
        (
            control(READY),
            (
                f"sequence batching must specify either {FALSE_TRUE} or 'bool_false_true' for "
                "CONTROL_SEQUENCE_READY for m"
            ),
        ),
        (
            control(READY + "int32_false_true: [0, 1] fp32_false_true: [0, 1]"),
            (
                f"sequence batching specifies more than one from {FALSE_TRUE} and 'bool_false_true' for "
                "CONTROL_SEQUENCE_READY for m"
            ),
        ),
        (
            control(READY + "int32_false_true: [0, 1, 2]"),
            (
                "sequence batching control 'int32_false_true' must have exactly 2 entries for "
                "CONTROL_SEQUENCE_READY for m"
            ),
        ),
        (
            control("kind: CONTROL_SEQUENCE_END bool_false_true: false"),
            ("sequence batching control 'bool_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_END for m"),
        ),
        (
            control(CORRID + "data_type: TYPE_UINT64 int32_false_true: [0, 1]"),
            (
                f"sequence batching must not specify either {FALSE_TRUE} or 'bool_false_true' for "
                "CONTROL_SEQUENCE_CORRID for m"
            ),
        ),
        # Tensors are checked in their order; the second tensor has no name either.
        (
            control("kind: CONTROL_SEQUENCE_START") + control(READY, ""),
            (
                f"sequence batching must specify either {FALSE_TRUE} or 'bool_false_true' for "
                "CONTROL_SEQUENCE_START for m"
            ),
        ),
        (
            control(CORRID + "data_type: TYPE_FP32"),
            (
                "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are "
                "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            ),
        ),
        (
            "oldest { preferred_batch_size: 0 }",
            "sequence batching preferred batch size must be positive for m",
        ),
        (
            "oldest { preferred_batch_size: 5 }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        (
            "direct { minimum_slot_utilization: -0.1 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (
            "direct { minimum_slot_utilization: 1.1 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
    ],
)
def test_a_broken_rule_has_triton_s_text(more: str, message: str, prepared: Prepare) -> None:
    with pytest.raises(BadConfig) as caught:
        check_config(prepared(sequence(more)), "m")
    assert caught.value.message == message


def test_a_response_cache_for_sequences_is_refused(prepared: Prepare) -> None:
    with pytest.raises(BadConfig) as caught:
        check_config(prepared(sequence("") + "response_cache { enable: true }"), "m")
    assert caught.value.message == (
        "Response Cache does not currently support model m with sequence batching scheduler. "
        "Please disable the response cache."
    )


# ---- implicit state -------------------------------------------------------------------------

STATE = 'input_name: "S" output_name: "T" data_type: TYPE_FP32 '


def state(fields: str, initial: str = "") -> str:
    return f"state [{{ {fields} {initial} }}]"


def initial(fields: str) -> str:
    return f"initial_state {{ {fields} }} "


GOOD = 'name: "zero" data_type: TYPE_FP32 dims: [2, 3] zero_data: true'


def test_a_state_may_have_an_initial_value_for_variable_dimensions(prepared: Prepare) -> None:
    check_states(prepared(sequence(state(STATE + "dims: [2, -1]", initial(GOOD)))))
    check_states(prepared(sequence(state(STATE + "dims: [-1]"))))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (state(STATE.replace('"S"', '""')), "sequence batching state must specify 'input_name' for "),
        (
            state(STATE.replace("TYPE_FP32", "TYPE_INVALID")),
            "sequence batching state 'S' must specify 'data_type' for ",
        ),
        (
            state(STATE.replace("TYPE_FP32", "99")),  # a protobuf enum field may contain a number that has no name
            "sequence batching state 'S' must specify 'data_type' for ",
        ),
        (state(STATE + "dims: [0]"), "sequence batching state 'S' dimension must be integer >= 1, or -1 "),
        (
            state(STATE + "dims: [2, 3]", initial(GOOD) * 2),
            "initial_state field for state input 'S' must contain exactly one or zero element. Found '2' elements.",
        ),
        (
            state(STATE + "dims: [2, 3]", initial(GOOD.replace("FP32", "INT8"))),
            "The data type used for 'initial_state' field of state 'S' does not match the state data type.",
        ),
        (
            state(STATE + "dims: [2, 3]", initial(GOOD.replace('"zero"', '""'))),
            "Field 'name' must be set when using initial_state for state input 'S'.",
        ),
        (
            state(STATE + "dims: [2]", initial(GOOD)),
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            "'S'. 2 != 1",
        ),
        (
            state(STATE + "dims: [2, -1]", initial(GOOD.replace("3]", "-1]"))),
            "'initial_state' field for state input name 'S' contains variable dimensions.",
        ),
        (
            state(STATE + "dims: [2, 4]", initial(GOOD)),
            "'initial_state' dim for input name 'S' doesn't match 'state' dim description. 3 != 4",
        ),
        (
            state(STATE + "dims: [2, 3]", initial(GOOD.replace("zero_data: true", ""))),
            "initial_state setting expects state'S' to have state_data set",
        ),
    ],
)
def test_a_wrong_state_is_refused(prepared: Prepare, given: str, text: str) -> None:
    with pytest.raises(BadConfig) as refused:
        check_states(prepared(sequence(given)))
    assert refused.value.message.startswith(text)

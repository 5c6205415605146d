"""Which steps the requested outputs need."""

from __future__ import annotations

from kernel.config.spec import EnsembleSpec
from schedulers.ensemble.plan import EnsemblePlan
from schedulers.testing import spec_of, step
from shm.tensor import RequestedOutput

#: A → b; b → Y and c; c → Z.
STEPS = EnsembleSpec(
    (
        step("first", {"IN": "A"}, {"OUT": "b"}),
        step("both", {"IN": "b"}, {"OUT": "Y", "MORE": "c"}),
        step("last", {"IN": "c", "AGAIN": "b"}, {"OUT": "Z"}),
    )
)


def plan() -> EnsemblePlan:
    spec = spec_of("e", "A M", "Y Z", optional="M", ensemble=STEPS)
    return EnsemblePlan(spec, STEPS)


def test_all_outputs_need_all_steps_and_have_the_order_of_triton() -> None:
    route = plan().route([])
    assert route.outputs == ("Z", "Y")
    assert route.readers == {"A": (0,), "b": (1, 2), "c": (2,)}
    assert route.uses == {"A": 1, "b": 2, "c": 1, "Y": 1, "Z": 1}


def test_steps_that_no_requested_output_needs_are_left_out() -> None:
    route = plan().route([RequestedOutput("Y")])
    assert route.outputs == ("Y",)
    assert route.readers == {"A": (0,), "b": (1,)}


def test_a_selection_of_outputs_is_computed_once() -> None:
    made = plan()
    assert made.route([RequestedOutput("Y")]) is made.route([RequestedOutput("Y")])


def test_optional_inputs_and_the_writers_of_tensors_are_known() -> None:
    made = plan()
    assert made.optional_inputs == ("M",)
    assert made.writers == {"b": 0, "Y": 1, "c": 1, "Z": 2}

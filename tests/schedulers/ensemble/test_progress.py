"""How far a request to an ensemble is, without requests and models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.spec import EnsembleSpec
from schedulers.ensemble.plan import EnsemblePlan
from schedulers.ensemble.progress import EnsembleProgress, Placed
from schedulers.testing import spec_of, step
from shm.arena import Arena
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from kernel.config.spec import EnsembleStep
    from schedulers.ensemble.progress import StepCall


def progress(
    *steps: EnsembleStep, inputs: str = "A", outputs: str = "Z", optional: str = "", wanted: str = "",
    decoupled: bool = False, streams: tuple[int, ...] = (0,),
) -> EnsembleProgress:  # fmt: skip
    ensemble = EnsembleSpec(steps)
    plan = EnsemblePlan(
        spec_of("e", inputs, outputs, optional=optional, ensemble=ensemble, decoupled=decoupled), ensemble
    )
    route = plan.route([RequestedOutput(name) for name in wanted.split()])
    return EnsembleProgress(plan, route, plan.sender(route, streams) if decoupled else None)


def placed(value: int = 0) -> Placed:
    return Placed(Tensor("", "INT32", [1], value.to_bytes(4, "little")), batched=False)


def value(found: Placed) -> int:
    assert found.tensor.data is not None
    return int.from_bytes(found.tensor.data, "little")


def sent(state: EnsembleProgress) -> list[dict[str, int]]:
    """Return the values of all responses that are complete."""
    found = []
    while (outputs := state.next_outputs()) is not None:
        found.append({name: value(each) for name, each in outputs})
    return found


def respond(state: EnsembleProgress, call: StepCall, *, final: bool = True, **outputs: int) -> list[StepCall]:
    if not call.responses:
        state.inputs_of(call)
    ready = state.responded(call, {name: placed(each) for name, each in outputs.items()})
    if final:
        state.ended(call)
    state.check()
    return ready


def steps_of(calls: list[StepCall]) -> list[int]:
    return [call.step for call in calls]


def test_a_step_starts_when_all_its_inputs_are_there() -> None:
    state = progress(
        step("a", {"IN": "A"}, {"OUT": "b"}),
        step("c", {"IN": "A"}, {"OUT": "d"}),
        step("e", {"IN": "b", "OTHER": "d"}, {"OUT": "Z"}),
    )
    first, second = state.begin({"A": placed()})
    assert steps_of([first, second]) == [0, 1]
    assert respond(state, first, b=1) == []
    (last,) = respond(state, second, d=2)
    assert last.step == 2
    assert [(name, value(each)) for name, each in state.inputs_of(last)] == [("IN", 1), ("OTHER", 2)]
    assert state.responded(last, {"Z": placed(3)}) == []
    state.ended(last)
    assert sent(state) == [{"Z": 3}]
    assert state.in_flight == 0
    assert not state.stuck


def test_a_tensor_is_dropped_when_its_last_reader_has_it() -> None:
    state = progress(step("a", {"IN": "A"}, {"OUT": "b"}), step("c", {"IN": "b", "OTHER": "b"}, {"OUT": "Z"}))
    with Arena("inputs", 1 << 16) as arena:
        block = arena.take(5000)
        assert block is not None
        given = Placed(Tensor("", "UINT8", [5000], None, block.span), batched=False)
        (first,) = state.begin({"A": given})
        ((_, taken),) = state.inputs_of(first)
        assert taken is given, "the only reader gets the lease itself"
        taken.release()
        assert arena.allocator.block_count == 0
        block = arena.take(5000)
        assert block is not None
        made = Placed(Tensor("", "UINT8", [5000], None, block.span), batched=False)
        (second,) = state.responded(first, {"b": made})
        both = state.inputs_of(second)
        assert [name for name, _ in both] == ["IN", "OTHER"]
        both[0][1].release()
        assert arena.allocator.block_count == 1, "each input has a lease of its own"
        both[1][1].release()
        assert arena.allocator.block_count == 0


def test_a_failed_request_gives_all_tensors_back() -> None:
    state = progress(step("a", {"IN": "A"}, {"OUT": "Z"}))
    with Arena("inputs", 1 << 16) as arena:
        block = arena.take(5000)
        assert block is not None
        state.begin({"A": Placed(Tensor("", "UINT8", [5000], None, block.span), batched=False)})
        state.drop()
        assert arena.allocator.block_count == 0
    assert sent(state) == []


def test_an_optional_input_that_is_not_given_is_left_out() -> None:
    state = progress(step("a", {"IN": "A", "MORE": "M"}, {"OUT": "Z"}), inputs="A M", optional="M")
    (call,) = state.begin({"A": placed(7)})
    assert [(name, value(each)) for name, each in state.inputs_of(call)] == [("IN", 7)]


def test_an_output_that_a_step_leaves_out_is_left_out_of_what_follows() -> None:
    state = progress(
        step("a", {"IN": "A"}, {"OUT": "b", "MORE": "Y"}), step("c", {"IN": "b"}, {"OUT": "Z"}), outputs="Y Z"
    )
    (first,) = state.begin({"A": placed()})
    (second,) = respond(state, first, Y=1)
    assert state.inputs_of(second) == []
    state.responded(second, {"Z": placed(2)})
    state.ended(second)
    assert sent(state) == [{"Z": 2, "Y": 1}]


def test_a_request_without_a_required_input_is_stuck() -> None:
    state = progress(step("a", {"IN": "A"}, {"OUT": "Z"}))
    assert state.begin({}) == []
    assert state.stuck


def test_steps_that_are_not_needed_do_not_start() -> None:
    state = progress(
        step("a", {"IN": "A"}, {"OUT": "Y"}), step("c", {"IN": "A"}, {"OUT": "Z"}), outputs="Y Z", wanted="Z"
    )
    assert steps_of(state.begin({"A": placed()})) == [1]


# ---- streams --------------------------------------------------------------------------------

TWO_STREAMS = (step("s1", {"IN": "A"}, {"OUT": "b"}), step("s2", {"IN": "b"}, {"OUT": "Z"}))
STREAM = (step("stream", {"IN": "A"}, {"OUT": "b"}), step("next", {"IN": "b"}, {"OUT": "Z"}))


def streaming(
    *steps: EnsembleStep, outputs: str = "Z", streams: tuple[int, ...] = (0,)
) -> tuple[EnsembleProgress, StepCall]:
    """Return the state of a request whose first step has started. The steps `streams` are decoupled."""
    state = progress(*(steps or STREAM), decoupled=True, outputs=outputs, streams=streams)
    (call,) = state.begin({"A": placed()})
    call.decoupled = True
    return state, call


def test_each_response_of_a_stream_is_executed_and_sent_in_the_order_of_the_stream() -> None:
    state, stream = streaming()
    calls = [respond(state, stream, final=False, b=number)[0] for number in range(3)]
    respond(state, calls[2], Z=102)
    respond(state, calls[0], Z=100)
    assert sent(state) == [{"Z": 100}]
    respond(state, calls[1], Z=101)
    assert sent(state) == [{"Z": 101}, {"Z": 102}]
    assert state.in_flight == 1
    state.ended(stream)
    assert (state.in_flight, state.stuck) == (0, False)


def test_outputs_of_a_stream_and_of_a_step_behind_it_belong_together() -> None:
    state, stream = streaming(
        step("stream", {"IN": "A"}, {"OUT": "b", "NUMBER": "Y"}), step("next", {"IN": "b"}, {"OUT": "Z"}), outputs="Y Z"
    )
    calls = [respond(state, stream, final=False, b=number, Y=number)[0] for number in range(2)]
    assert sent(state) == []
    respond(state, calls[1], Z=11)
    respond(state, calls[0], Z=10)
    assert sent(state) == [{"Z": 10, "Y": 0}, {"Z": 11, "Y": 1}]


def test_a_stream_without_a_response_is_no_failure() -> None:
    state, stream = streaming()
    state.ended(stream)
    assert (state.in_flight, state.stuck, sent(state)) == (0, False, [])


def test_credit_comes_back_when_the_client_took_what_was_made_from_a_response() -> None:
    state, stream = streaming()
    first, second = (respond(state, stream, final=False, b=number)[0] for number in range(2))
    respond(state, second, Z=2)
    respond(state, first, Z=1)
    assert len(sent(state)) == 2
    assert state.credits == []
    state.consumed(1)
    assert state.credits == [stream]
    state.consumed(5)
    assert state.credits == [stream, stream]


def test_a_response_of_which_nothing_comes_gives_its_credit_back() -> None:
    state, stream = streaming(
        step("stream", {"IN": "A"}, {"OUT": "b"}), step("s2", {"IN": "b"}, {"OUT": "Z"}), streams=(0, 1)
    )
    (inner,) = respond(state, stream, final=False, b=1)
    inner.decoupled = True
    state.inputs_of(inner)
    state.ended(inner)  # the second stream made nothing from it
    assert state.credits == [stream]


def test_a_stream_behind_a_stream_gives_credit_to_both() -> None:
    state, outer = streaming(
        step("s1", {"IN": "A"}, {"OUT": "b"}), step("s2", {"IN": "b"}, {"OUT": "Z"}), streams=(0, 1)
    )
    (inner,) = respond(state, outer, final=False, b=1)
    inner.decoupled = True
    respond(state, inner, final=False, Z=1)
    respond(state, inner, final=True, Z=2)
    assert sent(state) == [{"Z": 1}, {"Z": 2}]
    state.consumed(1)
    assert state.credits == [inner]
    state.consumed(1)
    assert state.credits == [inner, inner, outer]

"""Ensembles in a kernel with fake models: what their steps are asked, and what clients get.

One file, because its tests share the fake models that it begins with.
"""

from __future__ import annotations

import gc

import msgspec
import pytest

from kernel.config.spec import EnsembleSpec
from kernel.errors import InternalError, InvalidArgument, InvalidRequest, ModelNotFound, RequestCancelled, ServingError
from kernel.serving.catalog import ModelState
from kernel.serving.events import Submitted
from kernel.serving.request import Request
from schedulers.ensemble.waits import LONGEST_STALL_NS, LONGEST_WAIT_NS, MOST_STARTED
from schedulers.testing import KernelLab, spec_of, step
from shm.arena import Arena
from shm.tensor import RequestedOutput, Tensor
from tests.executed_lines import executed_lines

CHAIN = EnsembleSpec((step("first", {"IN": "A"}, {"OUT": "b"}), step("second", {"IN": "b"}, {"OUT": "Z"})))


@pytest.fixture
def lab() -> KernelLab:
    made = KernelLab()
    for name in ("first", "second"):
        made.add(spec_of(name, "IN", "OUT", dims=(-1,)))
    made.add(spec_of("stream", "IN", "OUT", dims=(-1,), decoupled=True))
    return made


def chain(lab: KernelLab) -> None:
    lab.add(spec_of("chain", "A", "Z", dims=(-1,), ensemble=CHAIN))


def tensor(name: str, *shape: int) -> Tensor:
    size = 4
    for dim in shape:
        size *= dim
    return Tensor(name, "FP32", list(shape), bytes(size))


def test_a_chain_runs_step_by_step_and_hands_down_what_the_client_said(lab: KernelLab) -> None:
    chain(lab)
    request, sink = lab.submit("chain", tensor("A", 2), id="seven")
    first = lab.call("first")
    assert lab.running == ["first"]
    assert (first.request.id, first.request.parent, first.inputs) == ("seven", request, {"IN": [2]})
    first.respond(tensor("OUT", 3))
    assert lab.running == ["second"]
    assert lab.call("second").inputs == {"IN": [3]}
    lab.call("second").respond(tensor("OUT", 4))
    (response,) = sink.responses
    assert response.error is None
    assert response.final
    assert [(t.name, t.shape) for t in response.outputs or []] == [("Z", [4])]
    assert response.parameters == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    lab.check()


def test_requests_of_steps_are_freed_as_soon_as_the_client_has_its_response(lab: KernelLab) -> None:
    """Without waiting for the garbage collector, which would stop the event loop more often."""
    chain(lab)
    gc.disable()
    try:
        counts: list[int] = []
        for _ in range(3):
            lab.submit("chain", tensor("A", 2))
            lab.call("first").respond()
            lab.call("second").respond()
            counts.append(steps_in_memory())
    finally:
        gc.enable()
    assert counts[0] == counts[1] == counts[2], "each scheduler may still have its last one"


def steps_in_memory() -> int:
    return sum(isinstance(each, Request) and each.parent is not None for each in gc.get_objects())


def test_independent_steps_run_at_the_same_time(lab: KernelLab) -> None:
    lab.add(spec_of("join", "X Y", "OUT", dims=(-1,)))
    steps = (
        step("first", {"IN": "A"}, {"OUT": "b"}),
        step("second", {"IN": "A"}, {"OUT": "c"}),
        step("join", {"X": "b", "Y": "c"}, {"OUT": "Z"}),
    )
    lab.add(spec_of("diamond", "A", "Z", dims=(-1,), ensemble=EnsembleSpec(steps)))
    _, sink = lab.submit("diamond", tensor("A", 2))
    assert lab.running == ["first", "second"]
    lab.call("second").respond(tensor("OUT", 5))
    assert lab.running == ["first"]
    lab.call("first").respond(tensor("OUT", 6))
    assert lab.call("join").inputs == {"X": [6], "Y": [5]}
    lab.call("join").respond()
    assert len(sink.responses) == 1
    lab.check()


def test_an_error_of_a_step_names_the_ensemble_and_comes_when_all_steps_have_ended(lab: KernelLab) -> None:
    steps = (step("first", {"IN": "A"}, {"OUT": "Y"}), step("second", {"IN": "A"}, {"OUT": "Z"}))
    lab.add(spec_of("pair", "A", "Y Z", dims=(-1,), ensemble=EnsembleSpec(steps)))
    _, sink = lab.submit("pair", tensor("A", 1))
    lab.call("first").fail(InvalidArgument("too small"))
    assert sink.responses == []
    second = lab.call("second")
    assert second.cancelled
    second.respond()
    (error,) = sink.errors
    assert (type(error), error.message) == (InvalidArgument, "in ensemble 'pair', too small")
    lab.check()


def test_an_error_about_bytes_that_a_step_reads_of_the_client_names_the_input_of_the_ensemble(lab: KernelLab) -> None:
    chain(lab)
    outer = (step("chain", {"A": "GIVEN"}, {"Z": "MADE"}),)
    lab.add(spec_of("outer", "GIVEN", "MADE", dims=(-1,), ensemble=EnsembleSpec(outer)))
    text = "[request id: x] expected 2 string elements for inference input '{}' for model '{}', got 1"
    for name, tensor_name in (("chain", "A"), ("outer", "GIVEN")):
        _, sink = lab.submit(name, tensor(tensor_name, 1))
        lab.call("first").fail(InvalidRequest(text.format("IN", "first")))
        (error,) = sink.errors
        assert (error.message, error.before_queueing) == (text.format(tensor_name, name), True)
    _, sink = lab.submit("chain", tensor("A", 1))
    lab.call("first").respond(tensor("OUT", 1))
    lab.call("second").fail(InvalidRequest(text.format("IN", "second")))
    (error,) = sink.errors
    assert error.message == f"in ensemble 'chain', {text.format('IN', 'second')}", "the tensor is of the first step"
    lab.check()


def test_a_request_of_a_step_that_its_model_refuses_fails_the_ensemble(lab: KernelLab) -> None:
    chain(lab)
    _, sink = lab.submit("chain", tensor("A", 1), id="x")
    lab.call("first").respond(Tensor("OUT", "FP32", [2, 2], bytes(16)))
    (error,) = sink.errors
    assert error.message.startswith(
        "in ensemble 'chain', [request id: x] unexpected shape for input 'IN' for model 'second'. Expected [-1], got"
    )
    assert not error.before_queueing
    lab.check()


def test_a_model_that_is_gone_fails_the_ensemble(lab: KernelLab) -> None:
    lab.add(spec_of("lost", "A", "Z", ensemble=EnsembleSpec((step("gone", {"IN": "A"}, {"OUT": "Z"}),))))
    _, sink = lab.submit("lost", "A")
    assert [error.message for error in sink.errors] == [
        f"in ensemble 'lost', {ModelNotFound('gone').message}",
    ]
    lab.check()


def test_a_cancelled_request_cancels_its_steps(lab: KernelLab) -> None:
    chain(lab)
    request, sink = lab.submit("chain", tensor("A", 1))
    request.cancel()
    first = lab.call("first")
    assert first.cancelled
    assert sink.responses == []
    first.respond()
    assert [type(error) for error in sink.errors] == [RequestCancelled]
    assert lab.running == []
    lab.check()


def test_versions_are_pinned_from_the_admission_of_a_request(lab: KernelLab) -> None:
    chain(lab)
    old = lab.catalog.resolve("second")
    _, sink = lab.submit("chain", tensor("A", 1))
    lab.catalog.set_state("second", 1, ModelState.UNLOADING, model=old)
    lab.call("first").respond()
    assert lab.call("second").model is old
    lab.call("second").respond()
    assert sink.errors == []
    _, late = lab.submit("chain", tensor("A", 1))
    assert len(late.errors) == 1


def test_steps_are_admitted_while_the_server_stops(lab: KernelLab) -> None:
    chain(lab)
    _, sink = lab.submit("chain", tensor("A", 1))
    lab.kernel.stopping = True
    lab.call("first").respond()
    lab.call("second").respond()
    assert sink.errors == []


def test_a_step_of_a_closed_version_fails_at_once(lab: KernelLab) -> None:
    chain(lab)
    _, sink = lab.submit("chain", tensor("A", 1))
    lab.catalog.resolve("second").close(InternalError("closed"))
    lab.call("first").respond()
    assert [error.message for error in sink.errors] == ["in ensemble 'chain', closed"]


def test_a_nested_ensemble_puts_both_names_before_its_errors(lab: KernelLab) -> None:
    chain(lab)
    lab.add(spec_of("outer", "A", "Z", dims=(-1,), ensemble=EnsembleSpec((step("chain", {"A": "A"}, {"Z": "Z"}),))))
    _, sink = lab.submit("outer", tensor("A", 1))
    lab.call("first").respond()
    lab.call("second").fail(InternalError("broken"))
    assert [error.message for error in sink.errors] == ["in ensemble 'outer', in ensemble 'chain', broken"]
    lab.check()


def test_an_ensemble_may_be_without_batches_and_its_steps_with_them(lab: KernelLab) -> None:
    lab.add(spec_of("rows", "IN", "OUT", dims=(2,), max_batch_size=4))
    lab.add(spec_of("flat", "IN", "OUT", dims=(2,)))
    steps = EnsembleSpec((step("rows", {"IN": "A"}, {"OUT": "b"}), step("flat", {"IN": "b"}, {"OUT": "Z"})))
    lab.add(spec_of("bridge", "A", "Z", dims=(2,), ensemble=steps))
    _, sink = lab.submit("bridge", tensor("A", 2))
    assert lab.call("rows").inputs == {"IN": [1, 2]}
    lab.call("rows").respond()
    assert lab.call("flat").inputs == {"IN": [2]}
    lab.call("flat").respond()
    assert [t.shape for t in sink.responses[0].outputs or []] == [[2]]


def test_what_a_response_says_of_its_sequence_goes_on(lab: KernelLab) -> None:
    chain(lab)
    _, sink = lab.submit("chain", tensor("A", 1))
    lab.call("first").respond(parameters={"sequence_id": "other", "sequence_start": True, "more": 3})
    second = lab.call("second")
    assert (second.request.correlation_id, second.request.sequence_start) == ("other", True)
    assert second.request.parameters == {}
    second.respond(parameters={"sequence_end": True})
    assert sink.responses[0].parameters == {"sequence_id": 0, "sequence_start": False, "sequence_end": True}


def test_a_required_input_that_is_missing_is_a_deadlock_as_in_triton(lab: KernelLab) -> None:
    lab.add(spec_of("two", "A M", "Z", dims=(-1,), optional="M", ensemble=CHAIN))
    _, sink = lab.submit("two", tensor("M", 1), id="d")
    assert [error.message for error in sink.errors] == [
        "in ensemble 'two', [request id: d] unexpected deadlock, at least one output is not set while no more ensemble "
        "steps can be made"
    ]
    lab.check()


def test_a_model_that_responds_twice_without_being_decoupled_is_an_error(lab: KernelLab) -> None:
    chain(lab)
    _, sink = lab.submit("chain", tensor("A", 1))
    first = lab.call("first")
    first.respond(final=False)
    first.respond()
    lab.call("second").respond()
    assert [error.message for error in sink.errors] == ["in ensemble 'chain', expected a single response, got 2"]
    lab.check()


def test_a_model_that_names_an_output_twice_keeps_no_memory(lab: KernelLab) -> None:
    chain(lab)
    with Arena("outputs", 1 << 20) as arena:
        blocks = [arena.take(4096) for _ in range(2)]
        lab.submit("chain", tensor("A", 1))
        made = [Tensor("OUT", "FP32", [1024], None, block.span) for block in blocks if block is not None]
        lab.call("first").respond(*made)
        assert arena.allocator.block_count == 1
        lab.call("second").respond(tensor("OUT", 1))
        assert arena.allocator.block_count == 0


# ---- streams --------------------------------------------------------------------------------


def streams(lab: KernelLab, limit: int = 0) -> None:
    steps = (step("stream", {"IN": "A"}, {"OUT": "b"}), step("second", {"IN": "b"}, {"OUT": "Z"}))
    ensemble = EnsembleSpec(steps, limit)
    lab.add(spec_of("streams", "A", "Z", dims=(-1,), decoupled=True, ensemble=ensemble))


def test_a_stream_is_final_with_its_last_response_or_after_it(lab: KernelLab) -> None:
    streams(lab)
    _, sink = lab.submit("streams", tensor("A", 1), streaming=True)
    stream = lab.call("stream")
    stream.respond(tensor("OUT", 1), final=False)
    stream.respond(tensor("OUT", 2), final=False)
    lab.call("second").respond()
    stream.finish()
    lab.call("second").respond()
    assert [(r.final, r.empty) for r in sink.responses] == [(False, False), (True, False)]
    _, sink = lab.submit("streams", tensor("A", 1), streaming=True)
    lab.call("stream").finish()
    assert [(r.final, r.empty) for r in sink.responses] == [(True, True)]
    lab.check()


def test_credit_reaches_the_stream_when_the_client_took_the_response(lab: KernelLab) -> None:
    streams(lab)
    request, _ = lab.submit("streams", tensor("A", 1), streaming=True)
    stream = lab.call("stream")
    stream.respond(tensor("OUT", 1), final=False)
    lab.call("second").respond()
    credit = lab.instances["stream"].credit
    assert credit == {}
    request.consumed()
    assert credit == {stream.request: 1}
    stream.finish()
    lab.check()


def test_a_limit_holds_calls_of_a_step_back(lab: KernelLab) -> None:
    streams(lab, limit=1)
    _, sink = lab.submit("streams", tensor("A", 1), streaming=True)
    stream = lab.call("stream")
    for size in (1, 2, 3):
        stream.respond(tensor("OUT", size), final=False)
    assert lab.running == ["stream", "second"]
    lab.call("second").respond()
    assert lab.call("second").inputs == {"IN": [2]}
    stream.finish()
    lab.clock.advance(LONGEST_WAIT_NS)
    assert lab.running == ["second", "second"], "one has waited too long"
    lab.call("second").respond()
    lab.call("second").respond()
    assert [len(r.outputs or []) for r in sink.responses] == [1, 1, 1]
    lab.check()


def test_a_failed_request_takes_its_waiting_calls_back(lab: KernelLab) -> None:
    streams(lab, limit=1)
    _, sink = lab.submit("streams", tensor("A", 1), streaming=True)
    _, other = lab.submit("streams", tensor("A", 1), streaming=True)
    assert lab.running == ["stream"]
    stream = lab.call("stream")
    stream.respond(tensor("OUT", 1), final=False)
    stream.respond(tensor("OUT", 2), final=False)
    lab.call("second").fail(InternalError("broken"))
    stream.finish()
    assert [error.message for error in sink.errors] == ["in ensemble 'streams', broken"]
    lab.call("stream").finish()
    assert other.errors == []
    assert lab.running == []
    lab.check()


def test_a_stream_whose_responses_its_own_model_reads_gets_its_credit_at_once(lab: KernelLab) -> None:
    steps = (step("stream", {"IN": "A"}, {"OUT": "b"}), step("stream", {"IN": "b"}, {"OUT": "Z"}))
    lab.add(spec_of("twice", "A", "Z", dims=(-1,), decoupled=True, ensemble=EnsembleSpec(steps)))
    lab.submit("twice", tensor("A", 1), streaming=True)
    stream = lab.call("stream")
    stream.respond(tensor("OUT", 1), final=False)
    assert lab.instances["stream"].credit == {stream.request: 1}
    inner = lab.calls[1]
    inner.respond(tensor("OUT", 1), final=False)
    assert lab.instances["stream"].credit == {stream.request: 1}, "the client reads those of the second step"
    inner.finish()
    stream.finish()
    lab.check()


def test_a_stream_that_stands_still_gets_its_credit_in_any_case(lab: KernelLab) -> None:
    streams(lab)
    _, sink = lab.submit("streams", tensor("A", 1), streaming=True)
    stream = lab.call("stream")
    for _ in range(3):
        stream.respond(tensor("OUT", 1), final=False)
    lab.clock.advance(LONGEST_STALL_NS - 1)
    assert lab.instances["stream"].credit == {}
    lab.clock.advance(1)
    assert lab.instances["stream"].credit == {stream.request: 3}
    stream.respond(tensor("OUT", 1), final=False)
    assert lab.instances["stream"].credit == {stream.request: 4}
    stream.finish()
    for _ in range(4):
        lab.call("second").respond()
    assert [response.final for response in sink.responses] == [False, False, False, True]
    lab.check()


def test_a_stream_that_waits_only_for_its_client_gets_no_credit(lab: KernelLab) -> None:
    streams(lab)
    request, _ = lab.submit("streams", tensor("A", 1), streaming=True)
    stream = lab.call("stream")
    stream.respond(tensor("OUT", 1), final=False)
    lab.call("second").respond()
    lab.clock.advance(2 * LONGEST_STALL_NS)
    assert lab.instances["stream"].credit == {}
    request.consumed()
    assert lab.instances["stream"].credit == {stream.request: 1}


def test_a_model_that_ends_without_a_response_is_a_deadlock_also_behind_a_stream(lab: KernelLab) -> None:
    streams(lab)
    _, sink = lab.submit("streams", tensor("A", 1), streaming=True)
    stream = lab.call("stream")
    stream.respond(tensor("OUT", 1), final=False)
    lab.call("second").finish()
    stream.finish()
    (error,) = sink.errors
    assert "unexpected deadlock" in error.message
    lab.check()


# ---- memory ---------------------------------------------------------------------------------


def test_an_output_is_the_input_of_the_next_step_under_the_same_lease(lab: KernelLab) -> None:
    chain(lab)
    with Arena("outputs", 1 << 20) as arena:
        block = arena.take(40_000)
        assert block is not None
        _, sink = lab.submit("chain", tensor("A", 1))
        lab.call("first").respond(Tensor("OUT", "FP32", [10_000], None, block.span))
        second = lab.call("second")
        (given,) = second.request.inputs
        assert given.span == block.span
        second.respond(tensor("OUT", 1))
        assert arena.allocator.block_count == 0
    assert sink.errors == []


@pytest.mark.parametrize("how", ["fail", "close", "crash"])
def test_tensors_between_steps_are_freed_however_the_request_ends(lab: KernelLab, how: str) -> None:
    steps = (
        step("first", {"IN": "A"}, {"OUT": "b"}),
        step("second", {"IN": "b"}, {"OUT": "c"}),
        step("first", {"IN": "b"}, {"OUT": "d"}),
        step("join", {"X": "c", "Y": "d"}, {"OUT": "Z"}),
    )
    lab.add(spec_of("join", "X Y", "OUT", dims=(-1,)))
    model = lab.add(spec_of("wide", "A", "Z", dims=(-1,), ensemble=EnsembleSpec(steps)))
    with Arena("outputs", 1 << 20) as arena:
        _, sink = lab.submit("wide", tensor("A", 1))
        for name, size in (("first", 10_000), ("second", 5_000)):
            block = arena.take(size * 4)
            assert block is not None
            lab.call(name).respond(Tensor("OUT", "FP32", [size], None, block.span))
        assert arena.allocator.block_count == 2
        last = lab.call("first")
        if how == "fail":
            last.fail(InternalError("broken"))
        elif how == "close":
            model.close(InternalError("closed"))
            last.respond()
        else:
            model.inbox.post(Submitted(None))  # type: ignore[arg-type]  # makes the scheduler fail
            last.respond()
        assert arena.allocator.block_count == 0
    assert len(sink.errors) == 1
    lab.check()


def test_a_client_s_place_is_given_to_the_step_that_writes_the_output(lab: KernelLab) -> None:
    chain(lab)
    with Arena("place", 1 << 16) as arena:
        block = arena.take(4096)
        assert block is not None
        output = RequestedOutput("Z", 0, block.span)
        _, sink = lab.submit("chain", tensor("A", 1), outputs=[output])
        assert [o.span for o in lab.call("first").request.outputs] == [None]
        lab.call("first").respond()
        second = lab.call("second")
        (asked,) = second.request.outputs
        assert asked.name == "OUT"
        assert asked.span is not None
        assert asked.span.lease.region is block.span.lease.region
        second.respond(Tensor("OUT", "FP32", [4], None, asked.span.shared()))
        (response,) = sink.responses
        assert [(t.name, t.span is not None) for t in response.outputs or []] == [("Z", True)]
        response.release()
        assert arena.allocator.block_count == 0
    lab.check()


def test_an_output_that_another_step_reads_is_written_twice(lab: KernelLab) -> None:
    lab.add(spec_of("both", "A", "Y Z", dims=(-1,), ensemble=EnsembleSpec(
        (step("first", {"IN": "A"}, {"OUT": "Y"}), step("second", {"IN": "Y"}, {"OUT": "Z"}))
    )))  # fmt: skip
    outputs = [RequestedOutput("Y", classification=2), RequestedOutput("Z")]
    _, sink = lab.submit("both", tensor("A", 1), outputs=outputs)
    first = lab.call("first")
    assert [(o.name, o.classification, o.labels, o.batched) for o in first.request.outputs] == [
        ("OUT", 2, None, False),
        ("OUT", 0, None, None),
    ]
    first.respond(Tensor("OUT", "BYTES", [2], b"classes"), tensor("OUT", 3))
    assert lab.call("second").inputs == {"IN": [3]}
    lab.call("second").respond(tensor("OUT", 1))
    (response,) = sink.responses
    assert {t.name: (t.datatype, t.shape) for t in response.outputs or []} == {"Y": ("BYTES", [2]), "Z": ("FP32", [1])}
    lab.check()


@pytest.mark.parametrize(("own", "asked"), [((), None), (("a", "b"), ["a", "b"])])
def test_classes_have_the_labels_of_the_ensemble_or_else_of_the_model(
    lab: KernelLab, own: tuple[str, ...], asked: list[str] | None
) -> None:
    spec = spec_of("labelled", "A", "Z", dims=(-1,), ensemble=EnsembleSpec((step("first", {"IN": "A"}, {"OUT": "Z"}),)))
    output = msgspec.structs.replace(spec.outputs["Z"], label_filename="labels.txt" if own else "", labels=own)
    lab.add(msgspec.structs.replace(spec, outputs={"Z": output}))
    lab.submit("labelled", tensor("A", 1), outputs=[RequestedOutput("Z", classification=1)])
    assert [output.labels for output in lab.call("first").request.outputs] == [asked]
    lab.call("first").respond(Tensor("OUT", "BYTES", [1], b"classes"))


# ---- statistics -----------------------------------------------------------------------------


def test_an_ensemble_counts_requests_and_the_times_of_its_steps(lab: KernelLab) -> None:
    chain(lab)
    _, _ = lab.submit("chain", tensor("A", 1))
    lab.call("first").respond()
    lab.call("second").respond()
    counted = lab.catalog.resolve("chain").statistics
    assert (counted.success.count, counted.execution_count, counted.inference_count) == (1, 1, 1)
    assert (counted.input_ns, counted.infer_ns, counted.output_ns) == (20, 40, 60)
    assert counted.batches[1].infer_ns == 40


def test_a_failed_request_counts_once_and_without_times(lab: KernelLab) -> None:
    chain(lab)
    lab.submit("chain", tensor("A", 1))
    lab.call("first").respond()
    lab.call("second").fail(InternalError("broken"))
    counted = lab.catalog.resolve("chain").statistics
    assert (counted.success.count, counted.fail.count, counted.failures["OTHER"]) == (0, 1, 1)
    assert counted.infer_ns == 0


def test_an_error_of_ours_is_no_error_of_the_client(lab: KernelLab) -> None:
    chain(lab)
    _, sink = lab.submit("chain", tensor("A", 1))
    lab.call("first").fail(ServingError("unknown"))
    assert [type(error) for error in sink.errors] != [InvalidArgument]


def test_the_work_of_cancelling_calls_that_wait_grows_no_faster_than_their_number() -> None:
    def work(count: int) -> int:
        lab = KernelLab()
        lab.add(spec_of("first", "IN", "OUT", dims=(-1,)))
        steps = (step("first", {"IN": "A"}, {"OUT": "Z"}),)
        lab.add(spec_of("one", "A", "Z", dims=(-1,), ensemble=EnsembleSpec(steps, 1)))
        requests = [lab.submit("one", tensor("A", 1))[0] for _ in range(count)]

        def cancel_all() -> None:
            for request in reversed(requests):
                request.cancel()

        return executed_lines(cancel_all)

    assert work(200) < 2.5 * work(100)


def test_calls_that_waited_and_fail_at_once_do_so_in_several_iterations() -> None:
    count = 1000
    lab = KernelLab()
    first = lab.add(spec_of("first", "IN", "OUT", dims=(4,)))
    steps = (step("first", {"IN": "A"}, {"OUT": "Z"}),)
    lab.add(spec_of("one", "A", "Z", dims=(-1,), ensemble=EnsembleSpec(steps, 1)))
    _, good = lab.submit("one", tensor("A", 4))
    bad = [lab.submit("one", tensor("A", 3))[1] for _ in range(count)]
    _, last = lab.submit("one", tensor("A", 4))
    lab.call("first").respond()
    assert (good.errors, len(good.responses)) == ([], 1)
    assert sum(len(sink.responses) for sink in bad) == MOST_STARTED
    lab.check()
    for _ in range(count // MOST_STARTED + 1):
        lab.clock.end_iteration()
    assert all("unexpected shape for input 'IN'" in str(error) for sink in bad for error in sink.errors)
    assert [len(sink.responses) for sink in bad] == [1] * count
    lab.call("first").respond()
    assert (last.errors, len(last.responses)) == ([], 1)
    assert not first.in_flight
    lab.check()


def test_a_call_that_was_to_start_in_a_later_iteration_and_is_cancelled_lets_the_next_one_start() -> None:
    lab = KernelLab()
    lab.add(spec_of("first", "IN", "OUT", dims=(4,)))
    steps = (step("first", {"IN": "A"}, {"OUT": "Z"}),)
    lab.add(spec_of("one", "A", "Z", dims=(-1,), ensemble=EnsembleSpec(steps, 1)))
    lab.submit("one", tensor("A", 4))
    for _ in range(MOST_STARTED):
        lab.submit("one", tensor("A", 3))
    left, gone = lab.submit("one", tensor("A", 4))
    _, last = lab.submit("one", tensor("A", 4))
    lab.call("first").respond()
    assert lab.running == []
    left.cancel()
    lab.check()
    lab.clock.end_iteration()
    assert [type(error) for error in gone.errors] == [RequestCancelled]
    lab.call("first").respond()
    assert (last.errors, len(last.responses)) == ([], 1)
    lab.check()


def test_calls_that_have_all_waited_too_long_start_in_several_iterations() -> None:
    lab = KernelLab()
    lab.add(spec_of("first", "IN", "OUT", dims=(-1,)))
    steps = (step("first", {"IN": "A"}, {"OUT": "Z"}),)
    lab.add(spec_of("one", "A", "Z", dims=(-1,), ensemble=EnsembleSpec(steps, 1)))
    for _ in range(2 * MOST_STARTED + 1):
        lab.submit("one", tensor("A", 1))
    lab.clock.time_ns += LONGEST_WAIT_NS - 1
    lab.clock.advance(1)
    counts = [len(lab.running)]
    for _ in range(2):
        lab.clock.end_iteration()
        counts.append(len(lab.running))
    assert counts[-1] == 2 * MOST_STARTED + 1
    lab.check()
    lab.kernel.abandon()

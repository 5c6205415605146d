"""Answers leave the worker: the finals of a batch together, others at once, each request once."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.held_inputs import HeldInputs
from backends.worker.inputs import InputReader
from backends.worker.memory import AttachedRegions
from backends.worker.output_memory import ArenaOutputs
from backends.worker.outputs import OutputWriter
from backends.worker.request import OutputValue
from backends.worker.responder import FAST_NS, MAX_KEPT_NS, MAX_OVERSHOOT, BatchResponder
from kernel.errors import InternalError, Unavailable
from shm.arena import INLINE_LIMIT, Arena
from shm.arrays import datatype_of
from shm.tensor import RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from backends.worker.request import WorkerRequest

LARGE = np.arange(INLINE_LIMIT, dtype=np.float32)


class NoMail:
    """A mailbox in which nothing comes; a wait for credit ends with the test's own grant."""

    def __init__(self) -> None:
        self.waits = 0
        self.on_wait: Any = None

    def poll(self) -> None:
        """Nothing has come."""

    def wait_until(self, done: Any) -> None:
        self.waits += 1
        self.on_wait()
        assert done()


class Bench:
    def __init__(self) -> None:
        self.sent: list[wire.ToKernel] = []
        self.arenas: list[Arena] = []
        self.mail = NoMail()
        self.held = HeldInputs(self.sent.append, lambda: None)
        regions = AttachedRegions()
        self.memory = ArenaOutputs(self.arenas.append)
        self.outputs = OutputWriter(regions, InputReader(regions, self.held), self.memory, self.held)
        self.answers = BatchResponder(self.outputs, self.held, self.sent.append, lambda: self.mail)  # type: ignore[arg-type, return-value]

    def batch(self, *refs: wire.RequestMessage) -> list[WorkerRequest]:
        return self.answers.open_batch(refs)

    @property
    def blocks(self) -> int:
        return self.arenas[0].allocator.block_count if self.arenas else 0


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.memory.close()


def ref(number: int, *outputs: RequestedOutput) -> wire.RequestMessage:
    return wire.RequestMessage(number, [], list(outputs))


def value(name: str = "OUT", array: Any = None) -> OutputValue:
    return OutputValue(name, "FP32", np.ones(2, np.float32) if array is None else array)


def test_final_answers_of_a_batch_leave_together(bench: Bench) -> None:
    first, second = bench.batch(ref(1), ref(2))
    second.respond([value()])
    first.fail(Unavailable("no"))
    assert bench.sent == []
    finals = bench.answers.close_batch()
    assert [final.error_text for final in finals] == ["no", ""]
    assert finals[1].outputs[0].data == np.ones(2, np.float32).tobytes()


def test_answers_that_come_later_are_sent_at_once(bench: Bench) -> None:
    first, second = bench.batch(ref(1), ref(2))
    first.respond([value()])
    assert bench.answers.close_batch() == []
    assert [(m.request, m.final) for m in bench.sent if isinstance(m, wire.Responded)] == [(1, True)]
    second.respond([value()], final=False)
    second.finish()
    assert [(m.request, m.final) for m in bench.sent if isinstance(m, wire.Responded)] == [
        (1, True),
        (2, False),
        (2, True),
    ]


def test_requests_whose_clients_have_gone_are_answered_instead_of_executed(bench: Bench) -> None:
    bench.answers.cancel([2])
    (first,) = bench.batch(ref(1), ref(2))
    assert first.ref.number == 1
    first.respond([value()])
    assert [final.error_code for final in bench.answers.close_batch()] == ["", "cancelled"]
    (third,) = bench.batch(ref(3))
    assert not third.is_cancelled()


def test_the_answers_of_one_batch_are_not_those_of_the_next(bench: Bench) -> None:
    (first,) = bench.batch(ref(1))
    assert bench.answers.close_batch() == []
    (second,) = bench.batch(ref(2))
    first.respond([value("LATE")])
    second.respond([value("OUT")])
    (final,) = bench.answers.close_batch()
    assert [output.name for output in final.outputs] == ["OUT"]
    (late,) = bench.sent
    assert isinstance(late, wire.Responded)
    assert (late.request, late.final) == (1, True)


def test_a_second_final_answer_is_refused(bench: Bench) -> None:
    (request,) = bench.batch(ref(1))
    request.respond([value()])
    with pytest.raises(InternalError):
        request.respond([value()])


def test_large_outputs_go_to_the_arena_and_reserved_ones_are_not_copied(bench: Bench) -> None:
    (request,) = bench.batch(ref(1))
    place = request.reserve("OUT", "FP32", LARGE.shape)
    assert place is not None
    place[:] = LARGE
    request.respond([value(array=place), value("OTHER", LARGE)])
    (final,) = bench.answers.close_batch()
    spans = [output.span for output in final.outputs if output.span is not None]
    assert [span.lease.region_number for span in spans] == [wire.OUTPUT_ARENA] * 2
    for span in spans:
        seen = bench.arenas[0].region.view(span.offset, span.byte_size)
        np.testing.assert_array_equal(np.frombuffer(seen, np.float32), LARGE)
    assert bench.blocks == 2
    bench.outputs.memory.free([span.offset for span in spans])
    assert bench.blocks == 0


def test_what_was_reserved_and_not_used_is_freed(bench: Bench) -> None:
    (request,) = bench.batch(ref(1))
    assert request.reserve("OUT", "FP32", LARGE.shape) is not None
    request.fail(Unavailable("no"))
    assert bench.blocks == 0


def test_small_strings_and_classes_have_no_place_to_reserve(bench: Bench) -> None:
    plain, classes = bench.batch(ref(1), ref(2, RequestedOutput("OUT", classification=3)))
    assert plain.reserve("OUT", "FP32", [2]) is None
    assert plain.reserve("OUT", "BYTES", [5000]) is None
    assert classes.reserve("OUT", "FP32", LARGE.shape) is None
    assert plain.reserve("OUT", "FP32", LARGE.shape) is not None
    plain.finish()
    classes.finish()


def test_outputs_that_nobody_asked_for_are_left_out(bench: Bench) -> None:
    (request,) = bench.batch(ref(1, RequestedOutput("B")))
    request.respond([value("A"), value("B")])
    (final,) = bench.answers.close_batch()
    assert [output.name for output in final.outputs] == ["B"]


@pytest.mark.parametrize("outputs", [(), (RequestedOutput("OTHER"), RequestedOutput("OUT"))])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        np.arange(12, dtype=np.int32).reshape(2, 6)[:, ::2],
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(6, dtype=np.uint16),
        np.zeros((0, 3), np.float64),
        np.array(True),
    ],
    ids=["plain", "fortran", "strided", "big-endian", "half", "empty", "scalar"],
)
def test_a_small_tensor_is_in_the_message_as_one_in_a_place_would_be(
    bench: Bench, array: Any, outputs: tuple[RequestedOutput, ...]
) -> None:
    """The short way of most outputs, and the long one, which a request with reserved places takes."""
    short, long = bench.batch(ref(1, *outputs), ref(2, *outputs))
    datatype = datatype_of(array)
    assert datatype is not None
    short.respond([OutputValue("OUT", datatype, array)])
    assert long.reserve("OTHER", "FP32", LARGE.shape) is not None
    long.respond([OutputValue("OUT", datatype, array)])
    first, second = bench.answers.close_batch()
    assert first.outputs == second.outputs
    (output,) = first.outputs
    assert output.data == array.astype(array.dtype.newbyteorder("<")).tobytes()
    assert output.shape == list(array.shape)


def test_a_response_that_cannot_be_written_leaves_no_block_behind(bench: Bench) -> None:
    (request,) = bench.batch(ref(1, RequestedOutput("OUT"), RequestedOutput("CLASSES", classification=1)))
    request.respond([value(array=LARGE), OutputValue("CLASSES", "BYTES", np.array([b"a"], object))])
    (final,) = bench.answers.close_batch()
    assert final.error_text == "class result not available for output due to unsupported type 'BYTES'"
    assert bench.blocks == 0


def test_a_stream_waits_when_it_is_too_far_ahead_of_its_client(bench: Bench) -> None:
    (request,) = bench.batch(ref(1))
    bench.mail.on_wait = lambda: bench.answers.grant(1, 16)
    for _ in range(wire.CREDIT_WINDOW):
        request.respond([value()], final=False)
    assert bench.mail.waits == 0
    request.respond([value()], final=False)
    assert bench.mail.waits == 1


def test_a_cancelled_stream_never_waits(bench: Bench) -> None:
    (request,) = bench.batch(ref(1))
    bench.mail.on_wait = lambda: bench.answers.cancel([1])
    for _ in range(wire.CREDIT_WINDOW + 1):
        request.respond([value()], final=False)
    assert request.is_cancelled()


# ---- one response ---------------------------------------------------------------------------


def logged(bench: Bench) -> list[str]:
    return [message.text for message in bench.sent if isinstance(message, wire.Log)]


def test_what_follows_the_one_response_of_a_request_is_dropped_and_logged(bench: Bench) -> None:
    bench.answers.single_response = True
    (request,) = bench.batch(ref(1))
    request.respond([value()], final=False)
    request.respond([value(array=LARGE)], final=False)
    request.fail(Unavailable("no"))
    assert request.finished
    seen = [(m.final, m.response is None) for m in bench.sent if isinstance(m, wire.Responded)]
    assert seen == [(False, False), (True, True)]
    assert logged(bench) == [
        "a request that has its response was given another response; the client does not get it",
        "a request that has its response was given an error: no; the client does not get it",
    ]
    assert bench.blocks == 0


def test_a_decoupled_request_gets_all_its_responses(bench: Bench) -> None:
    (request,) = bench.batch(ref(1))
    request.respond([value()], final=False)
    request.respond([value()], final=False)
    request.fail(Unavailable("no"))
    assert len([m for m in bench.sent if isinstance(m, wire.Responded)]) == 3
    assert logged(bench) == []


# ---- streams that are ahead -----------------------------------------------------------------


def ahead(bench: Bench) -> WorkerRequest:
    """Return a request whose client has a full window of responses to take."""
    (request,) = bench.batch(ref(1))
    for _ in range(wire.CREDIT_WINDOW):
        assert not request.is_ahead()
        request.respond([value()], final=False)
    assert request.is_ahead()
    return request


def test_a_request_that_is_ahead_says_when_its_client_has_taken_responses(bench: Bench) -> None:
    request, calls = ahead(bench), []
    request.when_taken(lambda: calls.append("first"))
    request.when_taken(lambda: calls.append("second"))
    assert calls == []
    bench.answers.grant(1, 1)
    assert (calls, request.is_ahead()) == (["second"], False)
    bench.answers.grant(1, 1)
    request.when_taken(lambda: calls.append("at once"))
    assert calls == ["second", "at once"]


@pytest.mark.parametrize("end", ["cancel", "finish", "fail"])
def test_a_request_without_a_client_or_with_its_final_response_is_not_ahead(bench: Bench, end: str) -> None:
    request, calls = ahead(bench), []
    request.when_taken(lambda: calls.append("called"))
    if end == "cancel":
        bench.answers.cancel([1])
    elif end == "finish":
        request.finish()
    else:
        request.fail(Unavailable("no"))
    assert (calls, request.is_ahead()) == (["called"], False)


def test_a_thread_with_an_event_loop_does_not_wait_up_to_a_limit(bench: Bench) -> None:
    request = ahead(bench)
    request.loop_thread = threading.get_ident()
    for _ in range(MAX_OVERSHOOT):
        request.respond([value()], final=False)
    assert bench.mail.waits == 0
    bench.mail.on_wait = lambda: bench.answers.grant(1, MAX_OVERSHOOT + 1)
    request.respond([value()], final=False)
    assert bench.mail.waits == 1


def test_other_threads_wait(bench: Bench) -> None:
    request = ahead(bench)
    request.loop_thread = -1
    bench.mail.on_wait = lambda: bench.answers.grant(1, 1)
    request.respond([value()], final=False)
    assert bench.mail.waits == 1


@pytest.mark.parametrize(
    ("datatype", "array"),
    [("FP32", np.ones(2)), ("FP32", LARGE.astype(np.float64)), ("INT64", np.ones(2, np.int32)),
     ("FP64", np.array([b"text"], object)), ("BF16", np.ones(2, np.float32))],
)  # fmt: skip
def test_an_array_that_does_not_have_the_datatype_of_its_output_is_an_error(
    bench: Bench, datatype: str, array: Any
) -> None:
    [request] = bench.batch(ref(1))
    request.respond([OutputValue("OUT", datatype, array)])
    [final] = bench.answers.close_batch()
    assert final.error_text == f"output 'OUT' has the datatype {datatype}, and its array is of {array.dtype}"
    assert bench.blocks == 0


def test_an_array_of_float64_is_not_taken_for_text(bench: Bench) -> None:
    [request] = bench.batch(ref(1))
    request.respond([OutputValue("A", "BYTES", np.array([b"a"], object)), OutputValue("B", "FP64", np.ones(1))])
    [final] = bench.answers.close_batch()
    assert [tensor.datatype for tensor in final.outputs] == ["BYTES", "FP64"]


# ---- responses of coroutines -------------------------------------------------------------------


class Outbox:
    """Messages that wait, what has left together, and the time."""

    def __init__(self) -> None:
        self.waiting: list[wire.ToKernel] = []
        self.sends: list[list[wire.ToKernel]] = []
        self.now_ns = 1_000_000

    def send_later(self, message: wire.ToKernel) -> None:
        self.waiting.append(message)

    def send(self, message: wire.ToKernel) -> None:
        self.waiting.append(message)
        self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.sends.append(self.waiting)
            self.waiting = []

    @property
    def sizes(self) -> list[int]:
        """How many messages each send had."""
        return [len(each) for each in self.sends]

    def respond(self, request: WorkerRequest, after_ns: int) -> None:
        self.now_ns += after_ns
        request.respond([value()], final=False)


@pytest.fixture
def outbox(bench: Bench) -> Outbox:
    made = Outbox()
    bench.answers = BatchResponder(
        bench.outputs, bench.held, made.send, lambda: bench.mail, None, made.send_later, made.flush,  # type: ignore[arg-type, return-value]
        lambda: made.now_ns,
    )  # fmt: skip
    return made


def in_coroutine(bench: Bench, steps: Callable[[WorkerRequest], Awaitable[None]]) -> None:
    (request,) = bench.batch(ref(1))
    bench.answers.close_batch()
    request.loop_thread = threading.get_ident()
    asyncio.run(steps(request))  # type: ignore[arg-type]  # it is a coroutine


def test_what_a_coroutine_sends_fast_leaves_together_when_it_awaits(bench: Bench, outbox: Outbox) -> None:
    async def steps(request: WorkerRequest) -> None:
        for _ in range(3):
            outbox.respond(request, FAST_NS // 10)
        assert (outbox.sizes, len(outbox.waiting)) == ([1], 2), "the first one leaves at once"
        await asyncio.sleep(0)
        assert outbox.sizes == [1, 2]
        outbox.respond(request, FAST_NS // 10)
        assert len(outbox.waiting) == 1
        request.finish()
        assert (outbox.sizes, outbox.waiting) == ([1, 2, 2], []), "the end takes along what waits"

    in_coroutine(bench, steps)
    numbers = [each.final for send in outbox.sends for each in send if isinstance(each, wire.Responded)]
    assert numbers == [False] * 4 + [True]


def test_what_a_coroutine_sends_slowly_leaves_at_once(bench: Bench, outbox: Outbox) -> None:
    async def steps(request: WorkerRequest) -> None:
        for _ in range(3):
            outbox.respond(request, FAST_NS + 1)
        assert (outbox.sizes, outbox.waiting) == ([1, 1, 1], [])

    in_coroutine(bench, steps)


def test_the_oldest_response_of_a_coroutine_waits_for_a_limited_time(bench: Bench, outbox: Outbox) -> None:
    async def steps(request: WorkerRequest) -> None:
        count = MAX_KEPT_NS // FAST_NS + 3
        for _ in range(count):
            outbox.respond(request, FAST_NS)
        assert outbox.sizes == [1, count - 1]

    in_coroutine(bench, steps)


def test_a_thread_of_a_coroutine_sends_at_once(bench: Bench, outbox: Outbox) -> None:
    async def steps(request: WorkerRequest) -> None:
        for _ in range(3):
            await asyncio.to_thread(outbox.respond, request, 1)
        assert (outbox.sizes, outbox.waiting) == ([1, 1, 1], [])

    in_coroutine(bench, steps)

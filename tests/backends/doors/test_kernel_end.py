"""The kernel's end of the connection to a door, with a kernel in this process and a connection that records."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from typing import TYPE_CHECKING, Any

import pytest

from backends.doors import messages
from backends.doors.door_end import received_error
from backends.doors.kernel_end import DoorRequests, KnownForm
from backends.transport.wire import RequestMessage
from kernel.errors import ArenaFull, InvalidArgument, NoMemory, QuotaExceeded, RequestCancelled
from kernel.serving.response import Response
from kernel.testing import model_spec
from protocols.status import http_status, may_retry
from shm.region import sealed_memfd
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kernel.serving.request import Request

pytestmark = pytest.mark.anyio

ARENA_BYTE_SIZE = 1 << 20


class RecordingChannel:
    """Keeps what is sent to the door, and has the descriptors of its messages."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.fds: list[int] = []
        #: Set when inputs are free.
        self.freed = asyncio.Event()

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if type(message) is messages.InputsFree:
            self.freed.set()

    def send_with_fd(self, message: Any, fd: int) -> None:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        self.sent.append(message)

    def take_fd(self) -> int:
        return self.fds.pop(0)


class DoorLab:
    """A kernel with the model `echo`, and a door that is played by the test."""

    def __init__(self) -> None:
        self.lab = FrontDoorLab()
        self.waiting: list[Request] = []
        self.instance = self.lab.add_model(model_spec("echo", dims=(-1,)), self._execute)
        self.channel = RecordingChannel()
        self.door = DoorRequests(self.lab.kernel, self.channel, "a door")  # type: ignore[arg-type]
        self.waits = False

    def _execute(self, request: Request) -> None:
        self.waiting.append(request)
        if not self.waits:
            self.respond()

    def respond(self) -> None:
        request = self.waiting.pop(0)
        (given,) = request.inputs
        span = None if given.span is None else given.span.shared()
        output = Tensor("OUT", "FP32", given.shape, given.data, span)
        request.respond(Response("echo", "1", request.id, [output], leased=span is not None))

    def add_form(self, number: int = 1, count: int = 1, model: str = "echo") -> None:
        self.door.add_form(messages.FormAdded(number, form(count, model)))

    def add_arena(self) -> None:
        self.channel.fds.append(sealed_memfd("a test", ARENA_BYTE_SIZE))
        self.door.add_arena(messages.ArenaAdded(1, "echo", ARENA_BYTE_SIZE))


def form(count: int = 1, model: str = "echo") -> messages.Form:
    wanted = RequestMessage(0, [Tensor("IN", "FP32", [count])])
    return messages.Form(model, "", wanted, "HTTP end point", ((b"X-One", b"a"), (b"x-one", b"b")))


@pytest.fixture
async def lab() -> AsyncIterator[DoorLab]:
    made = DoorLab()
    yield made
    made.lab.kernel.check()


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


async def test_requests_of_a_form_get_the_responses_of_their_own_bytes(lab: DoorLab) -> None:
    lab.add_form()
    for number in range(1, 4):
        lab.door.infer(messages.Infer(number, 1, [floats(number)], f"id {number}"))
    outputs = [(each.request, each.final, each.outputs[0].data, each.lease) for each in lab.channel.sent]
    assert outputs == [(number, True, floats(number), 0) for number in range(1, 4)]
    assert (lab.door.count, lab.door.open_count, lab.door.leased_count) == (3, 0, 0)


async def test_the_second_request_of_a_form_is_made_from_a_prepared_one() -> None:
    known = KnownForm(form())
    assert known.sizes == [4]
    assert known.prepared is None


async def test_an_input_in_the_arena_of_the_door_stays_until_it_is_free(lab: DoorLab) -> None:
    lab.add_form(count=2000)
    lab.add_arena()
    lab.waits = True
    for number in (1, 2):
        lab.door.infer(messages.Infer(number, 1, [messages.Place(1, 4096 * number, 8000)]))
    assert lab.channel.sent == []
    lab.respond()
    (response,) = lab.channel.sent
    place = response.outputs[0].span
    assert (place.lease.region_number, place.offset, place.byte_size) == (-1, 4096, 8000)  # it is where the input is
    lab.respond()
    assert len(lab.channel.sent) == 2  # the first response is still used
    lab.door.responses_sent(messages.ResponsesSent([response.lease]))
    await lab.channel.freed.wait()
    assert lab.channel.sent[2] == messages.InputsFree([1])
    lab.door.close()
    assert (lab.door.open_count, lab.door.leased_count) == (0, 0)


async def test_an_arena_that_was_removed_is_closed_after_its_last_request(lab: DoorLab) -> None:
    lab.add_form(count=2000)
    lab.add_arena()
    lab.waits = True
    lab.door.infer(messages.Infer(1, 1, [messages.Place(1, 0, 8000)]))
    region = lab.waiting[0].inputs[0].span.lease.region  # type: ignore[union-attr]
    lab.door.remove_arena(messages.ArenaRemoved(1))
    assert not region.closed
    lab.respond()
    lab.door.responses_sent(messages.ResponsesSent([lab.channel.sent[0].lease]))
    assert region.closed


async def test_a_door_that_dies_leaves_nothing_behind(lab: DoorLab) -> None:
    lab.add_form(count=2000)
    lab.add_arena()
    lab.waits = True
    for number in (1, 2):
        lab.door.infer(messages.Infer(number, 1, [messages.Place(1, 0, 8000)]))
    region = lab.waiting[0].inputs[0].span.lease.region  # type: ignore[union-attr]
    lab.respond()
    assert lab.door.leased_count == 1
    lab.door.close()
    waiting = lab.waiting.pop()
    waiting.cancel()
    if not waiting.finished:
        waiting.fail(RequestCancelled())
    assert (lab.door.open_count, lab.door.leased_count) == (0, 0)
    assert region.closed
    assert len(lab.channel.sent) == 1  # nothing is sent to a dead door


async def test_an_unknown_model_is_refused_as_front_doors_refuse_it(lab: DoorLab) -> None:
    lab.door.infer_once(messages.InferOnce(1, form(model="nobody"), [floats(1)]))
    (response,) = lab.channel.sent
    assert (response.final, response.refused, response.error.code) == (True, False, "not_found")
    assert "nobody" in response.error.text
    assert lab.door.open_count == 0


async def test_a_request_that_does_not_fit_its_model_is_refused(lab: DoorLab) -> None:
    lab.door.infer_once(messages.InferOnce(1, form(count=2), [floats(1)]))
    (response,) = lab.channel.sent
    assert (response.refused, response.error.code, response.error.before_queueing) == (True, "invalid_arg", True)


async def test_bytes_that_do_not_fit_the_form_are_checked_again(lab: DoorLab) -> None:
    lab.add_form()
    lab.door.infer(messages.Infer(1, 1, [floats(1)]))
    lab.door.infer(messages.Infer(2, 1, [floats(1, 2)]))
    assert lab.channel.sent[0].error is None
    assert lab.channel.sent[1].error.code == "invalid_arg"


async def test_a_changed_catalog_lets_the_next_request_be_checked_again(lab: DoorLab) -> None:
    lab.add_form()
    lab.door.infer(messages.Infer(1, 1, [floats(1)]))
    lab.lab.add_model(model_spec("echo", dims=(2,)), lambda request: None, version=2)
    lab.door.infer(messages.Infer(2, 1, [floats(1)]))
    assert lab.channel.sent[1].error.code == "invalid_arg"


@pytest.mark.parametrize(
    "break_protocol",
    [
        lambda lab: lab.door.infer(messages.Infer(1, 7, [floats(1)])),
        lambda lab: (lab.add_form(), lab.add_form()),
        lambda lab: (lab.add_form(), lab.door.infer(messages.Infer(0, 1, [floats(1)]))),
        lambda lab: (lab.add_form(), lab.door.infer(messages.Infer(1, 1, []))),
        lambda lab: (lab.add_form(), lab.door.infer(messages.Infer(1, 1, [None]))),
        lambda lab: (lab.add_form(), lab.door.infer(messages.Infer(1, 1, [messages.Place(1, 0, 4)]))),
        lambda lab: (
            lab.add_form(),
            lab.add_arena(),
            lab.door.infer(messages.Infer(1, 1, [messages.Place(1, ARENA_BYTE_SIZE - 2, 4)])),
        ),
        lambda lab: (
            lab.add_form(model="other"),
            lab.add_arena(),
            lab.door.infer(messages.Infer(1, 1, [messages.Place(1, 0, 4)])),
        ),
        lambda lab: lab.door.responses_sent(messages.ResponsesSent([3])),
        lambda lab: lab.door.remove_arena(messages.ArenaRemoved(3)),
        lambda lab: (lab.add_arena(), lab.add_arena()),
    ],
    ids=[
        "unknown form", "form twice", "old number", "too few inputs", "no bytes", "unknown arena", "outside the arena",
        "arena of another model", "unknown lease", "unknown arena removed", "arena twice",
    ],
)  # fmt: skip
async def test_a_message_that_breaks_the_protocol_is_refused(lab: DoorLab, break_protocol: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        break_protocol(lab)
    assert lab.door.open_count == 0


async def test_memory_that_is_not_sealed_is_refused(lab: DoorLab) -> None:
    lab.channel.fds.append(os.memfd_create("a test"))
    with pytest.raises(ValueError, match="memfd"):
        lab.door.add_arena(messages.ArenaAdded(1, "echo", ARENA_BYTE_SIZE))


async def test_headers_reach_rules_that_ask_for_them(lab: DoorLab) -> None:
    lab.waits = True
    lab.add_form()
    lab.door.infer(messages.Infer(1, 1, [floats(1)]))
    sink = lab.waiting[0].sink
    assert (sink.header("x-one"), sink.header("x-two"), sink.peer) == ("b", "", "")
    lab.respond()


@pytest.mark.parametrize(
    ("error", "status", "again"),
    [
        (QuotaExceeded("", 3), 429, True),
        (ArenaFull(10), 503, True),
        (ArenaFull(10, exceeded="--arena-byte-size=4"), 503, False),
        (InvalidArgument("wrong"), 400, False),
    ],
)
async def test_an_error_decides_in_the_door_what_it_decides_in_the_kernel(
    lab: DoorLab, error: Any, status: int, again: bool
) -> None:
    lab.waits = True
    lab.add_form()
    lab.door.infer(messages.Infer(1, 1, [floats(1)]))
    lab.waiting.pop().fail(error)
    found = received_error(lab.channel.sent[0].error)
    assert (found.text, found.code, found.before_queueing) == (error.text, error.code, error.before_queueing)
    assert (http_status(found), may_retry(found), isinstance(found, NoMemory)) == (
        status, again, isinstance(error, NoMemory),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [[2**62] * 1000, [2**62, 2**62], [-1]])
async def test_a_forged_shape_never_fits_and_is_not_multiplied_out(shape: list[int]) -> None:
    wanted = RequestMessage(0, [Tensor("IN", "FP32", shape)])
    known = KnownForm(messages.Form("echo", "", wanted, "HTTP end point", ()))
    (size,) = known.sizes
    assert size < -1, "neither a size nor any size"


async def test_a_door_can_have_only_so_many_arenas(lab: DoorLab) -> None:
    fd = sealed_memfd("a test", ARENA_BYTE_SIZE)

    def add(number: int) -> None:
        lab.channel.fds.append(os.dup(fd))
        lab.door.add_arena(messages.ArenaAdded(number, "echo", ARENA_BYTE_SIZE))

    try:
        for number in range(1, 2 * messages.MOST_ROUTES + 1):
            add(number)
        with pytest.raises(ValueError, match="more than 2048 arenas"):
            add(2 * messages.MOST_ROUTES + 1)
    finally:
        os.close(fd)
        lab.door.close()


async def test_the_forms_of_a_door_are_bounded_in_bytes_until_it_forgets_them(
    lab: DoorLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MOST_FORMS_BYTE_SIZE", 3 * messages.form_byte_size(form()))
    for number in range(1, 4):
        lab.add_form(number)
    with pytest.raises(ValueError, match="forms of"):
        lab.add_form(4)
    lab.door.forget_forms(messages.FormsForgotten())
    lab.add_form(5)


async def test_requests_of_a_stream_can_have_many_responses_of_which_the_client_takes_some(lab: DoorLab) -> None:
    wanted = RequestMessage(0, [Tensor("IN", "FP32", [1])])
    headers = ((b"x-one", b" a "),)
    lab.waits = True
    lab.door.infer_once(
        messages.InferOnce(1, messages.Form("echo", "", wanted, headers=headers, streaming=True, grpc=True,
                                            entry_point="ModelStreamInfer"), [floats(1)], "a", "", 12345)
    )  # fmt: skip
    (request,) = lab.waiting
    assert request.streaming
    assert request.deadline_ns == 12345
    assert request.sink.header("x-one") == "a"
    assert request.sink.reception()[0].protocol == "grpc"  # type: ignore[attr-defined]
    for _ in range(3):
        request.respond(Response("echo", "1", "a", [Tensor("OUT", "FP32", [1], floats(1))], final=False))
    lab.door.responses_taken(messages.ResponsesTaken(1, 2))
    assert lab.instance.credit == {request: 2}
    with pytest.raises(ValueError, match="2 responses were taken of request 1"):
        lab.door.responses_taken(messages.ResponsesTaken(1, 2))
    with pytest.raises(ValueError, match="0 responses were taken"):
        lab.door.responses_taken(messages.ResponsesTaken(1, 0))
    lab.respond()
    lab.door.responses_taken(messages.ResponsesTaken(1, 1))  # on its way when the final response was sent
    assert [each.final for each in lab.channel.sent] == [False, False, False, True]


async def test_an_error_that_is_found_at_once_is_marked(lab: DoorLab) -> None:
    """Streams respond to such a request as to one that was never made."""
    for number, (model, count) in enumerate((("nobody", 1), ("echo", 2)), 1):
        lab.door.infer_once(messages.InferOnce(number, form(count, model), [floats(1)]))
    lab.waits = True
    lab.door.infer_once(messages.InferOnce(3, form(), [floats(1)]))
    lab.waiting[0].fail(InvalidArgument("later"))
    assert [each.at_once for each in lab.channel.sent] == [True, True, False]

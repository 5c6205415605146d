"""What a front door keeps of calls that it passes on, and the connection over which it does."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import TYPE_CHECKING, Any

import pytest
from grpclib.const import Status
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset, WindowUpdated

from kernel.errors import MemoryFull
from protocols.grpc.framing import PREFIX, CompressedMessage, MessageMemory, MessageReader, RawPart, RefusedMessage
from protocols.grpc.h2.frames import H2ErrorCode
from protocols.grpc.relay import PassingReader, Relay, raw_message
from protocols.listening import adopt
from shm.blocks import ByteBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGE = 200_000


def message(content: bytes) -> bytes:
    return PREFIX.pack(0, len(content)) + content


def memory(limit: int = 1 << 30) -> MessageMemory:
    return MessageMemory(ByteBudget(limit), MemoryFull)


def pieces(octets: bytes, seed: int) -> Iterator[memoryview]:
    """Yield the bytes in pieces of many sizes."""
    chance, view = random.Random(seed), memoryview(octets)
    while view:
        taken = chance.choice((1, 3, 7, 1000, 1500, 70_000))
        yield view[:taken]
        view = view[taken:]


def feed(reader: MessageReader, data: memoryview) -> None:
    """Give the reader bytes as a connection does: to its buffer if it has one."""
    while data:
        buffer = reader.direct_buffer()
        if buffer is None:
            reader.feed(data)
            return
        taken = min(len(buffer), len(data))
        buffer[:taken] = data[:taken]
        reader.received_directly(taken)
        data = data[taken:]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_passed_on_are_the_bytes_that_came(seed: int) -> None:
    """Wherever the reader begins to pass on, also in a prefix, and in a large message that has its own memory."""
    chance = random.Random(seed)
    octets = b"".join(message(chance.randbytes(chance.choice((0, 1, 40, 3000, LARGE)))) for _ in range(6))
    counted = memory()
    reader = PassingReader(MessageReader("identity", counted))
    reader.choose_buffer = lambda start, size: memoryview(bytearray(size))
    all_pieces = list(pieces(octets, seed))
    begins = chance.randrange(len(all_pieces))
    for number, piece in enumerate(all_pieces):
        if number == begins:
            reader.pass_on()
        feed(reader, piece)
    reader.end()
    assert reader.fault is None
    assert b"".join(reader.take() for _ in range(len(reader.messages))) == octets  # type: ignore[misc]
    assert counted.budget.used_byte_size == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_reader_passes_on_from_the_large_message_that_is_served_elsewhere(seed: int) -> None:
    small, large = [b"a" * 50, b"b" * 2000], [b"c" * LARGE, b"d" * LARGE]
    asked: list[tuple[bytes, int]] = []
    counted = memory()

    def elsewhere(start: bytes, byte_size: int) -> bool:
        asked.append((start, byte_size))
        return start[:1] == b"d"

    reader = PassingReader(MessageReader("identity", counted))
    reader.choose_buffer = lambda start, size: memoryview(bytearray(size))
    reader.elsewhere = elsewhere
    rest = message(large[1]) + message(small[0])
    for piece in pieces(b"".join(map(message, [*small, large[0]])) + rest, seed):
        feed(reader, piece)
    found = [reader.take() for _ in range(len(reader.messages))]
    assert [bytes(each) for each in found[:3]] == [*small, large[0]]  # type: ignore[arg-type]
    assert all(isinstance(each, RawPart) for each in found[3:])
    assert b"".join(found[3:]) == rest  # type: ignore[arg-type]
    assert {(start[:1], byte_size) for start, byte_size in asked} == {(b"c", LARGE), (b"d", LARGE)}
    assert counted.budget.used_byte_size == 0


def test_a_reader_goes_on_where_another_one_has_come_to() -> None:
    first = MessageReader("identity", memory())
    octets = message(b"one") + message(b"second")
    first.feed(memoryview(octets[:12]))
    second = PassingReader(first)
    second.feed(memoryview(octets[12:]))
    assert list(second.messages) == [b"one", b"second"]


def test_bytes_for_which_there_is_no_memory_are_a_fault() -> None:
    reader = PassingReader(MessageReader("identity", memory(100)))
    reader.pass_on()
    reader.feed(memoryview(bytes(90)))
    assert reader.fault is None
    reader.feed(memoryview(bytes(90)))
    assert reader.fault is not None
    assert reader.fault.status is Status.RESOURCE_EXHAUSTED


def test_a_message_that_was_refused_cannot_be_passed_on() -> None:
    reader = PassingReader(MessageReader("identity"))
    reader.messages.append(RefusedMessage(MemoryFull(), b""))
    reader.pass_on()
    assert reader.fault is not None
    assert not b"".join(map(bytes, reader.messages))  # type: ignore[arg-type]


def test_a_compressed_message_stays_compressed() -> None:
    assert raw_message(CompressedMessage(b"abc", "gzip")) == PREFIX.pack(1, 3) + b"abc"
    assert raw_message(b"abc") == PREFIX.pack(0, 3) + b"abc"


class _Call:
    """A call that notes what it gets."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.pumped = 0
        self.changed = asyncio.Event()

    def _note(self, *what: Any) -> None:
        self.events.append(what)
        self.changed.set()

    def pump(self) -> None:
        self.pumped += 1
        self.changed.set()

    def take_headers(self, fields: Any) -> None:
        self._note("headers", dict(fields))

    def take_data(self, data: bytes, byte_size: int) -> None:
        self._note("data", data, byte_size)

    def take_trailers(self, fields: Any) -> None:
        self._note("trailers", dict(fields))

    def take_reset(self, code: H2ErrorCode) -> None:
        self._note("reset", code)

    def give_up(self, status: Status, text: str) -> None:
        self._note("lost", status)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class _Kernel(asyncio.Protocol):
    """The other end: a server of the library."""

    def __init__(self) -> None:
        self.http2 = H2Connection(H2Configuration(client_side=False, header_encoding="latin-1"))
        self.events: list[Any] = []
        self.changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.http2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.transport.write(self.http2.data_to_send())

    def data_received(self, data: bytes) -> None:
        self.events += self.http2.receive_data(data)
        self.flush()
        self.changed.set()

    async def next(self, kind: type) -> Any:
        """Return the next event of a kind."""
        while True:
            for each in self.events:
                if isinstance(each, kind):
                    self.events.remove(each)
                    return each
            self.changed.clear()
            await self.changed.wait()


FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a/B"),
    (":authority", "a"),
    ("te", "trailers"),
    ("x-text", "\xe4"),
]


@pytest.fixture
async def ends() -> Any:
    ours, theirs = socket.socketpair()
    relay, kernel = Relay(ByteBudget(1 << 20)), _Kernel()
    await adopt(theirs, lambda: kernel)
    yield relay, kernel, ours
    relay.close()
    kernel.transport.abort()
    if not relay.connected:
        ours.close()


@pytest.mark.anyio
async def test_a_call_that_begins_before_the_connection_is_made_gets_its_response(ends: Any) -> None:
    relay, kernel, sock = ends
    call = _Call()
    number = relay.begin(call, [*FIELDS, ("content-length", "7")])
    assert relay.send(number, memoryview(b"early")) == 0
    await adopt(sock, lambda: relay)
    begun = await kernel.next(RequestReceived)
    assert begun.headers == FIELDS
    assert call.pumped
    assert relay.send(number, memoryview(b"content")) == 7
    relay.end(number)
    assert (await kernel.next(DataReceived)).data == b"content"
    await kernel.next(StreamEnded)
    kernel.http2.send_headers(number, [(":status", "200"), ("x-more", "1")])
    kernel.http2.send_data(number, b"response")
    kernel.http2.send_headers(number, [("grpc-status", "0")], end_stream=True)
    kernel.flush()
    await call.wait_for(lambda: len(call.events) == 3)
    assert call.events == [
        ("headers", {":status": "200", "x-more": "1"}),
        ("data", b"response", 8),
        ("trailers", {"grpc-status": "0"}),
    ]


@pytest.mark.anyio
async def test_no_more_is_sent_than_the_kernel_takes(ends: Any) -> None:
    relay, kernel, sock = ends
    await adopt(sock, lambda: relay)
    call = _Call()
    number = relay.begin(call, FIELDS)
    await kernel.next(RequestReceived)
    data, sent = memoryview(bytes(100_000)), 0
    while step := relay.send(number, data[sent:]):
        sent += step
    assert sent == 65_535  # the window of HTTP/2
    pumped = call.pumped
    received = 0
    while received < sent:
        received += len((await kernel.next(DataReceived)).data)
    kernel.http2.acknowledge_received_data(received, number)
    kernel.flush()
    await call.wait_for(lambda: call.pumped > pumped)
    assert relay.send(number, data[sent:]) > 0


@pytest.mark.anyio
async def test_what_the_client_has_taken_opens_the_window_of_the_kernel(ends: Any) -> None:
    relay, kernel, sock = ends
    await adopt(sock, lambda: relay)
    call = _Call()
    number = relay.begin(call, FIELDS)
    await kernel.next(RequestReceived)
    kernel.http2.send_headers(number, [(":status", "200")])
    sent = 0
    while (room := min(kernel.http2.local_flow_control_window(number), 16_384)) > 0:
        kernel.http2.send_data(number, bytes(room))
        sent += room
    kernel.flush()
    await call.wait_for(lambda: sum(each[2] for each in call.events if each[0] == "data") == sent)
    kernel.events.clear()
    relay.taken(number, sent)
    await kernel.next(WindowUpdated)
    assert kernel.http2.local_flow_control_window(number) > 0


@pytest.mark.anyio
async def test_a_cancelled_call_is_reset_and_what_still_comes_of_it_is_dropped(ends: Any) -> None:
    relay, kernel, sock = ends
    await adopt(sock, lambda: relay)
    call, other = _Call(), _Call()
    number = relay.begin(call, FIELDS)
    await kernel.next(RequestReceived)
    relay.cancel(number)
    kernel.http2.send_headers(number, [(":status", "200")])  # it has not come yet
    kernel.http2.send_data(number, b"late")
    kernel.flush()
    await kernel.next(StreamReset)
    second = relay.begin(other, FIELDS)
    await kernel.next(RequestReceived)
    kernel.http2.send_headers(second, [(":status", "200"), ("grpc-status", "5")], end_stream=True)
    kernel.flush()
    await other.wait_for(lambda: bool(other.events))
    assert other.events == [("trailers", {":status": "200", "grpc-status": "5"})]
    assert call.events == []


@pytest.mark.anyio
async def test_calls_end_with_the_connection_to_the_kernel(ends: Any) -> None:
    relay, kernel, sock = ends
    await adopt(sock, lambda: relay)
    calls = [_Call(), _Call()]
    numbers = [relay.begin(each, FIELDS) for each in calls]
    await kernel.next(RequestReceived)
    await kernel.next(RequestReceived)
    kernel.http2.reset_stream(numbers[0], 8)
    kernel.flush()
    await calls[0].wait_for(lambda: bool(calls[0].events))
    kernel.transport.abort()
    await calls[1].wait_for(lambda: bool(calls[1].events))
    assert [each.events for each in calls] == [[("reset", H2ErrorCode.CANCEL)], [("lost", Status.UNAVAILABLE)]]
    assert relay.begin(_Call(), FIELDS) == 0


@pytest.mark.anyio
async def test_bytes_that_are_no_frames_end_the_connection(ends: Any) -> None:
    relay, kernel, sock = ends
    await adopt(sock, lambda: relay)
    call = _Call()
    relay.begin(call, FIELDS)
    await kernel.next(RequestReceived)
    kernel.transport.write(bytes((0, 0, 1, 0, 0, 0, 0, 0, 0, 0)))  # DATA of no stream
    await call.wait_for(lambda: bool(call.events))
    assert call.events == [("lost", Status.UNAVAILABLE)]

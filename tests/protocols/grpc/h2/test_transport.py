"""A connection on a transport that does what the test says: event-loop iterations, backpressure, and the end."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from kernel.loop.iteration_end import IterationEnd
from protocols.grpc.h2 import frames, limits, transport
from protocols.grpc.h2.frames import H2ErrorCode, Setting
from protocols.grpc.h2.headers import encode_block, status_trailers
from protocols.grpc.h2.streams import Stream, StreamCallbacks
from protocols.grpc.h2.transport import ServerConnection
from protocols.loop_budgets import ITERATION_BYTE_SIZE, ITERATION_MESSAGE_COUNT, ITERATION_NS

SECOND = 10**9
GREETING = frames.PREFACE + frames.settings([])
BLOCK = encode_block([(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("te", "trailers")])
PING = frames.frame_header(8, frames.PING, 0, 0) + bytes(8)


def request(number: int, content: bytes = b"") -> bytes:
    message = bytes([0]) + len(content).to_bytes(4, "big") + content
    return (
        frames.frame_header(len(BLOCK), frames.HEADERS, frames.END_HEADERS, number)
        + BLOCK
        + frames.frame_header(len(message), frames.DATA, frames.END_STREAM, number)
        + message
    )


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.reading = True
        self.unwritten = 0
        self.ended = self.aborted = self.closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.written.append(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0, "what is written must be known to have left"

    def get_write_buffer_size(self) -> int:
        return self.unwritten

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    @property
    def output(self) -> bytes:
        return b"".join(self.written)


class RefusedCall:
    """A call that gets a status as soon as its request has arrived."""

    def __init__(self, connection: ServerConnection, stream: Stream) -> None:
        self._connection = connection
        self._stream = stream
        self.ends: list[str] = []

    def complete(self, message: bytes | None) -> None:
        self.readable()

    def readable(self) -> None:
        self._connection.sending.send_trailers(self._stream, status_trailers(5, "no"))
        self._connection.schedule_write()

    def data_sent(self) -> None:
        self.ends.append("data sent")

    def closed(self) -> None:
        self.ends.append("closed")

    def terminate(self) -> None:
        self.ends.append("terminated")


class HeldCall(RefusedCall):
    """A call that gets no response."""

    def readable(self) -> None:
        pass


class Acceptor:
    def __init__(self, call_type: type[RefusedCall]) -> None:
        self.call_type = call_type
        self.open: set[ServerConnection] = set()
        self.calls: list[RefusedCall] = []
        self.refuses = False

    def connection_opened(self, connection: ServerConnection) -> None:
        self.open.add(connection)

    def connection_closed(self, connection: ServerConnection) -> None:
        self.open.discard(connection)

    def accept_call(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        if self.refuses:
            connection.sending.send_trailers(stream, status_trailers(14, "no"))
            return None
        self.calls.append(self.call_type(connection, stream))
        return self.calls[-1]

    def connection_idle(self) -> None:
        pass


Conversation = Callable[[ServerConnection, Wire, Acceptor], Coroutine[Any, Any, None]]


def converse(conversation: Conversation, call_type: type[RefusedCall] = RefusedCall) -> None:
    async def main() -> None:
        acceptor, wire = Acceptor(call_type), Wire()
        connection = ServerConnection(acceptor)
        connection.connection_made(wire)
        receive(connection, GREETING)
        wire.written.clear()
        await conversation(connection, wire, acceptor)

    asyncio.run(main())


def receive(connection: ServerConnection, octets: bytes) -> None:
    """Give bytes to the connection as a socket does that has them all."""
    while octets:
        buffer = connection.get_buffer(-1)
        size = min(len(buffer), len(octets))
        buffer[:size] = octets[:size]
        connection.buffer_updated(size)
        octets = octets[size:]


async def some_iterations() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_responses_to_calls_that_arrive_together_leave_in_one_write() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        receive(connection, request(1) + request(3) + PING)
        assert len(wire.written) == 1
        assert wire.output.count(b"grpc-status") == 2

    converse(conversation)


@pytest.mark.parametrize("joined", [False, True])
def test_a_response_that_comes_alone_is_written_at_once_and_others_together(joined: bool) -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        receive(connection, request(1) + request(3))
        wire.written.clear()
        IterationEnd.current().joins_writes = joined
        for octets in (PING, PING):
            connection.sending.write_queue.put(octets)
            connection.write_soon()
        IterationEnd.current().joins_writes = False
        assert wire.written == ([] if joined else [PING, PING])
        await asyncio.sleep(0)
        assert wire.output == PING + PING
        assert len(wire.written) == (1 if joined else 2)

    converse(conversation)


def test_an_iteration_handles_a_limited_number_of_frames_and_reading_waits_for_the_rest() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        receive(connection, PING * limits.FRAMES_PER_READ + request(1))
        assert not wire.reading
        assert not acceptor.calls
        await asyncio.sleep(0)
        assert len(acceptor.calls) == 1
        assert wire.reading

    converse(conversation)


def test_many_connections_with_many_frames_share_an_iteration() -> None:
    async def main() -> None:
        acceptor, messages = Acceptor(RefusedCall), transport.message_budget()
        connections = [ServerConnection(acceptor, messages=messages) for _ in range(50)]
        for connection in connections:
            connection.connection_made(Wire())
            receive(connection, GREETING)
            receive(connection, request(1))
            await asyncio.sleep(0)
        acceptor.calls.clear()
        sent = b"".join(request(number) for number in range(3, 67, 2))
        for connection in connections:
            buffer = connection.get_buffer(-1)
            buffer[: len(sent)] = sent
            connection.buffer_updated(len(sent))
        done = len(acceptor.calls)
        assert done <= 2 * 32 + 48 * limits.LEAST_FRAMES_PER_READ
        while done < 50 * 32:
            await asyncio.sleep(0)
            before, done = done, len(acceptor.calls)
            assert 0 < done - before <= ITERATION_MESSAGE_COUNT
        assert all(connection.transport.reading for connection in connections if isinstance(connection.transport, Wire))
        for connection in connections:
            connection.connection_lost(None)

    asyncio.run(main())


def test_a_client_that_does_not_read_its_responses_is_not_read_any_further() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        connection.pause_writing()
        number = 1
        while wire.reading and number < 10_000:
            receive(connection, request(number))
            number += 2
            await asyncio.sleep(0)
        assert not wire.reading
        assert not wire.written
        assert connection.sending.write_queue.byte_size < 2 * transport.MAX_BACKLOG_BYTE_SIZE
        connection.resume_writing()
        await asyncio.sleep(0)
        assert wire.reading
        assert wire.output.count(b"grpc-status") == len(acceptor.calls)

    converse(conversation)


def test_a_connection_whose_socket_accepts_nothing_for_too_long_is_aborted() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        connection.pause_writing()
        connection.check_progress(0)
        connection.check_progress(transport.WRITE_TIMEOUT_S * SECOND - 1)
        assert not wire.aborted
        connection.check_progress(transport.WRITE_TIMEOUT_S * SECOND)
        assert wire.aborted

    converse(conversation)


def test_a_large_response_leaves_in_pieces_as_the_socket_accepts_them() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        windows = frames.settings([(Setting.INITIAL_WINDOW_SIZE, 2**30)]) + frames.window_update(0, 2**30)
        receive(connection, windows + request(1))
        released: list[bool] = []
        stream = connection.http2.streams.by_id[1]
        connection.sending.respond(stream, [bytes(3 * 2**20)], lambda: released.append(True))
        connection.schedule_write()
        await asyncio.sleep(0)
        connection.pause_writing()
        taken = len(wire.output)
        await asyncio.sleep(0)
        assert len(wire.output) == taken < 2 * ITERATION_BYTE_SIZE
        assert not released
        connection.resume_writing()
        await some_iterations()
        assert released == [True]
        assert len(wire.output) > 3 * 2**20

    converse(conversation, HeldCall)


def test_memory_is_released_when_the_transport_has_written_it() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        windows = frames.settings([(Setting.INITIAL_WINDOW_SIZE, 2**30)]) + frames.window_update(0, 2**30)
        receive(connection, windows + request(1))
        released: list[bool] = []
        wire.unwritten = 5
        content = bytes(ITERATION_BYTE_SIZE // 4)
        connection.sending.respond(connection.http2.streams.by_id[1], [content], lambda: released.append(True))
        connection.schedule_write()
        await asyncio.sleep(0)
        assert len(wire.output) > len(content)
        assert not released
        wire.unwritten = 0
        connection.resume_writing()
        assert released == [True]

    converse(conversation, HeldCall)


class BufferingCall(HeldCall):
    """A call that has memory for its large message."""

    def __init__(self, connection: ServerConnection, stream: Stream) -> None:
        super().__init__(connection, stream)
        self.memory = bytearray()
        if stream.complete_message is None:
            stream.message_reader.choose_buffer = self._choose_buffer

    def _choose_buffer(self, message_start: bytes, byte_size: int) -> memoryview:
        self.memory = bytearray(byte_size)
        return memoryview(self.memory)


def test_a_large_message_is_received_in_the_buffer_of_its_call() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        content = bytes(range(256)) * 2**11
        # Behind the first, its headers are known, and a large call begins in one step.
        for number, begin in ((1, b""), (3, b""), (5, PING), (9, request(7))):
            receive(connection, begin + request(number, content) + PING)
            [message] = connection.http2.streams.by_id[number].message_reader.messages
            assert message == content
            call = acceptor.calls[-1]
            assert isinstance(call, BufferingCall)
            assert call.memory == content
        assert wire.output.count(frames.frame_header(8, frames.PING, frames.ACK, 0)) == 5

    converse(conversation, BufferingCall)


def in_frames(number: int, content: bytes) -> bytes:
    """Return a call whose message comes in frames of 16 KiB."""
    message = bytes([0]) + len(content).to_bytes(4, "big") + content
    parts = [message[start : start + 2**14] for start in range(0, len(message), 2**14)]
    return b"".join(
        (
            frames.frame_header(len(BLOCK), frames.HEADERS, frames.END_HEADERS, number),
            BLOCK,
            *(frames.frame_header(len(part), frames.DATA, 0, number) + part for part in parts),
            frames.frame_header(0, frames.DATA, frames.END_STREAM, number),
        )
    )


@pytest.mark.parametrize("most", [1000, 30_000, 10**6])
def test_connections_that_share_memory_keep_what_a_read_has_left(most: int) -> None:
    async def main() -> None:
        sizes = Random(most)
        acceptor = Acceptor(BufferingCall)
        connections = [ServerConnection(acceptor) for _ in range(3)]
        contents = [bytes([number]) * (300_000 + number) for number in range(3)]
        waiting = []
        for connection, content in zip(connections, contents, strict=True):
            connection.connection_made(Wire())
            waiting.append(GREETING + request(1, b"small") + in_frames(3, content) + PING + request(5, content))
        while any(waiting):
            for index, connection in enumerate(connections):
                size = sizes.randint(1, most)
                receive(connection, waiting[index][:size])
                waiting[index] = waiting[index][size:]
            await asyncio.sleep(0)
        await some_iterations()
        for connection, content in zip(connections, contents, strict=True):
            streams = connection.http2.streams.by_id
            found = [[bytes(each) for each in streams[number].message_reader.messages] for number in (1, 3, 5)]  # type: ignore[arg-type]
            assert found == [[b"small"], [content], [content]]
            assert isinstance(connection.transport, Wire)
            assert connection.transport.output.count(frames.frame_header(8, frames.PING, frames.ACK, 0)) == 1
            connection.connection_lost(None)

    asyncio.run(main())


def test_a_large_message_in_small_frames_is_received_in_larger_reads() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        octets = in_frames(1, bytes(10**6))
        usual = len(connection.get_buffer(-1))
        receive(connection, octets[:usual])
        assert len(connection.get_buffer(-1)) > usual
        receive(connection, octets[usual:])
        assert len(connection.get_buffer(-1)) == usual
        assert [len(each) for each in connection.http2.streams.by_id[1].message_reader.messages] == [10**6]  # type: ignore[arg-type]

    converse(conversation, BufferingCall)


def test_a_large_request_that_is_refused_by_its_headers_does_not_disturb_others() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        receive(connection, request(1))
        acceptor.refuses = True
        content = bytes(2**17)
        receive(connection, request(3, content) + request(5, content))
        assert not connection.http2.streams.by_id
        assert wire.output.count(b"grpc-status") == 3
        assert not connection.sending.ended

    converse(conversation)


@pytest.mark.parametrize("octets", [PING * 1000, frames.frame_header(0, frames.SETTINGS, 0, 1)])
def test_a_connection_that_failed_says_why_and_drops_what_still_arrives(octets: bytes) -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        receive(connection, request(1))
        receive(connection, octets)
        await some_iterations()
        assert wire.ended
        end = wire.output
        assert bytes([frames.GOAWAY, 0, 0, 0, 0, 0, 0, 0, 0, 1]) in end
        assert acceptor.calls[0].ends == ["closed"]
        for _ in range(100):
            receive(connection, PING * 1000)
        assert wire.output == end
        assert wire.reading

    converse(conversation, HeldCall)


def test_calls_learn_that_their_connection_is_lost() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        receive(connection, request(1))
        connection.connection_lost(None)
        assert acceptor.calls[0].ends == ["closed"]
        assert acceptor.open == set()

    converse(conversation, HeldCall)


def test_a_connection_that_is_closed_sends_goaway() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        receive(connection, request(1))
        connection.terminate_calls()
        connection.close()
        assert acceptor.calls[0].ends == ["terminated", "closed"]
        assert wire.output.endswith(frames.goaway(1, H2ErrorCode.NO_ERROR))
        assert wire.closed

    converse(conversation, HeldCall)


# ---- keepalive and age ----------------------------------------------------------------------

PONG = frames.frame_header(8, frames.PING, frames.ACK, 0) + bytes(8)


def test_a_connection_that_is_too_old_closes_when_its_client_knows_and_the_last_call_has_ended() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        receive(connection, request(1))
        connection.drain()
        assert wire.output == frames.goaway(2**31 - 1, H2ErrorCode.NO_ERROR, "max_age") + frames.PING_REQUEST
        receive(connection, request(3) + PONG)  # the client made call 3 before it knew
        assert len(acceptor.calls) == 2
        receive(connection, request(5))
        assert len(acceptor.calls) == 2
        assert wire.output.endswith(frames.rst_stream(5, H2ErrorCode.REFUSED_STREAM))
        assert not wire.closed
        for number in (1, 3):
            connection.sending.send_trailers(connection.http2.streams.by_id[number], status_trailers(5, "no"))
        connection.schedule_write()
        await some_iterations()
        assert wire.closed
        assert wire.output.endswith(frames.goaway(5, H2ErrorCode.NO_ERROR))

    converse(conversation, HeldCall)


def test_a_connection_that_is_too_old_and_idle_waits_only_for_the_client_to_know() -> None:
    async def conversation(connection: ServerConnection, wire: Wire, acceptor: Acceptor) -> None:
        connection.drain()
        await some_iterations()
        assert not wire.closed
        receive(connection, PONG)
        assert wire.closed

    converse(conversation)


def test_calls_that_take_long_share_an_iteration_by_their_time() -> None:
    async def main() -> None:
        messages = transport.message_budget()
        done: list[RefusedCall] = []

        class SlowCall(RefusedCall):
            def readable(self) -> None:
                messages.spent(ITERATION_NS)
                super().readable()
                done.append(self)

        acceptor = Acceptor(SlowCall)
        connections = [ServerConnection(acceptor, messages=messages) for _ in range(2)]
        for connection in connections:
            connection.connection_made(Wire())
            receive(connection, GREETING)
            receive(connection, request(1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        done.clear()
        for connection in connections:
            receive(connection, b"".join(request(number) for number in range(3, 23, 2)))
        assert len(done) == 1
        while len(done) < 20:
            before = len(done)
            await asyncio.sleep(0)
            assert len(done) <= before + 1
        for _ in range(3):
            await asyncio.sleep(0)
        assert all(connection.transport.reading for connection in connections if isinstance(connection.transport, Wire))
        for connection in connections:
            connection.connection_lost(None)

    asyncio.run(main())

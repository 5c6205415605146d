"""Messages of gRPC: found however their bytes are cut, inflated, and refused with the right status."""

import contextlib
import gzip
import random
import tracemalloc
import zlib

import pytest
from grpclib.const import Status
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import ArenaFull, MemoryFull
from protocols.grpc import framing
from protocols.grpc.framing import (
    CompressedMessage,
    InflatedTooLarge,
    MessageFault,
    MessageMemory,
    MessageReader,
    RefusedMessage,
    inflate,
)
from protocols.large_requests import LOOP_BYTE_SIZE
from protocols.request_limits import RECEIVE_BUFFER_BYTE_SIZE
from shm.blocks import ByteBudget


def framed(content: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(content).to_bytes(4, "big") + content


def read(octets: bytes, encoding: str = "identity") -> MessageReader:
    reader = MessageReader(encoding)
    reader.feed(memoryview(octets))
    reader.end()
    return reader


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 30)), st.integers(1, 32))
def test_messages_are_found_however_their_bytes_are_cut(messages: list[bytes], cuts: list[int], large: int) -> None:
    octets = b"".join(map(framed, messages))
    reader = MessageReader("identity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "RECEIVE_BUFFER_BYTE_SIZE", large)
        for size in cuts:
            reader.feed(memoryview(octets[:size]))
            octets = octets[size:]
        reader.feed(memoryview(octets))
        reader.end()
    assert [bytes(message) for message in reader.messages] == messages  # type: ignore[arg-type]
    assert reader.fault is None


def test_a_large_message_is_received_in_the_buffer_that_is_chosen_by_its_first_bytes() -> None:
    content = bytes(range(256)) * (RECEIVE_BUFFER_BYTE_SIZE // 256)
    memory, asked = bytearray(len(content)), []

    def choose(message_start: bytes, byte_size: int) -> memoryview:
        asked.append((message_start, byte_size))
        return memoryview(memory)

    reader = MessageReader("identity")
    reader.choose_buffer = choose
    for start in range(0, len(content) + 5, 700):
        reader.feed(memoryview(framed(content)[start : start + 700]))
    assert asked == [(content[: framing.MESSAGE_START_BYTE_SIZE], len(content))]
    assert memory == content
    assert [bytes(message) for message in reader.messages] == [content]  # type: ignore[arg-type]


def test_what_arrives_before_a_buffer_can_be_chosen_is_gathered() -> None:
    content = bytes(range(256)) * (RECEIVE_BUFFER_BYTE_SIZE // 128)
    octets, memory = framed(content), bytearray(len(content))
    reader = MessageReader("identity")
    reader.feed(memoryview(octets[:50_000]))
    reader.choose_buffer = lambda message_start, byte_size: memoryview(memory)
    buffer = reader.direct_buffer()
    assert buffer is not None
    assert len(buffer) == len(octets) - 50_000
    reader.feed(memoryview(octets[50_000:]))
    assert memory == content
    assert [bytes(message) for message in reader.messages] == [content]  # type: ignore[arg-type]


def test_a_large_message_can_be_received_directly_into_its_buffer() -> None:
    content = bytes(range(256)) * (RECEIVE_BUFFER_BYTE_SIZE // 256)
    octets = framed(content)
    reader = MessageReader("identity")
    assert reader.direct_buffer() is None
    reader.feed(memoryview(octets[:2000]))
    buffer = reader.direct_buffer()
    assert buffer is not None
    assert len(buffer) == len(octets) - 2000
    buffer[:] = octets[2000:]
    reader.received_directly(len(buffer))
    assert reader.direct_buffer() is None
    assert [bytes(message) for message in reader.messages] == [content]  # type: ignore[arg-type]


@pytest.mark.parametrize("octets", [b"\0", b"\0\0\0\0", framed(b"abc")[:-1], framed(bytes(300_000))[:-1]])
def test_a_message_that_is_cut_off_is_a_fault(octets: bytes) -> None:
    fault = read(octets).fault
    assert fault == MessageFault(Status.INTERNAL, "Unable to parse request: the message is incomplete")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_messages_are_inflated_and_others_left_alone(encoding: str) -> None:
    compressed = gzip.compress(b"abc") if encoding == "gzip" else zlib.compress(b"abc")
    reader = read(framed(compressed, 1) + framed(b"plain"), encoding)
    assert list(reader.messages) == [b"abc", b"plain"]


@pytest.mark.parametrize(
    ("octets", "encoding", "status"),
    [
        (framed(b"abc", 1), "identity", Status.INTERNAL),
        (framed(b"abc", 7), "gzip", Status.INTERNAL),
        (framed(b"abc", 1), "gzip", Status.INTERNAL),
        (framed(gzip.compress(b"abc", mtime=0)[:-4], 1), "gzip", Status.INTERNAL),
        (b"\0\x80\0\0\0", "identity", Status.RESOURCE_EXHAUSTED),
        (b"\1\x7f\xff\xff\xff", "gzip", Status.RESOURCE_EXHAUSTED),
    ],
)
def test_faults_have_the_status_that_grpc_gives_them(octets: bytes, encoding: str, status: Status) -> None:
    reader = read(octets + framed(b"more"), encoding)
    assert reader.fault is not None
    assert reader.fault.status is status
    assert not reader.messages


def test_a_message_that_becomes_large_is_left_compressed() -> None:
    small, large = gzip.compress(bytes(LOOP_BYTE_SIZE)), gzip.compress(bytes(LOOP_BYTE_SIZE + 1))
    assert list(read(framed(small, 1), "gzip").messages) == [bytes(LOOP_BYTE_SIZE)]
    assert list(read(framed(large, 1), "gzip").messages) == [CompressedMessage(large, "gzip")]


def test_content_beyond_a_limit_is_refused() -> None:
    compressed = gzip.compress(bytes(1001))
    assert inflate(compressed, "gzip", 1001) == bytes(1001)
    with pytest.raises(InflatedTooLarge, match=r"^Decompressed message larger than max \(1000\)$"):
        inflate(compressed, "gzip", 1000)


@pytest.mark.parametrize("start", [b"", gzip.compress(bytes(1 << 20))[:500]], ids=["at once", "at the limit"])
def test_what_is_not_inflated_of_a_large_message_is_not_copied(start: bytes) -> None:
    message = start + bytes(8 << 20)
    tracemalloc.start()
    try:
        with contextlib.suppress(InflatedTooLarge):
            assert inflate(message, "gzip", 100_000) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_message_that_is_inflated_in_several_steps_is_complete() -> None:
    content = random.Random(1).randbytes(1 << 20)
    assert inflate(gzip.compress(content, 1), "gzip", 1 << 20) == content
    assert inflate(gzip.compress(content, 1)[:-1], "gzip", 1 << 20) is None


def test_a_message_that_is_refused_is_read_and_forgotten() -> None:
    error = ArenaFull(5)

    def choose(start: bytes, byte_size: int) -> memoryview:
        raise error

    reader = MessageReader("identity")
    reader.choose_buffer = choose
    large = bytes(range(256)) * 1024
    for part in (framed(large)[:5000], framed(large)[5000:], framed(b"next")):
        reader.feed(memoryview(part))
    assert reader.direct_buffer() is None
    assert list(reader.messages) == [RefusedMessage(error, large[:1024]), b"next"]


def test_a_message_that_begins_before_its_call_exists_is_received_where_the_call_chooses() -> None:
    large = bytes(range(256)) * 1024
    memory = bytearray(len(large))
    reader = MessageReader("identity")
    reader.feed(memoryview(framed(large))[:60_000])  # together with the headers of its call
    reader.choose_buffer = lambda message_start, byte_size: memoryview(memory)
    reader.feed(memoryview(framed(large))[60_000:])
    assert [bytes(each) for each in reader.messages if isinstance(each, memoryview)] == [large]
    assert memory == large


def test_a_message_is_refused_by_its_announced_size_before_it_arrives() -> None:
    assert read(b"\0\x80\0\0\0").fault == MessageFault(
        Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({2**31} vs. {2**31 - 1})"
    )


# ---- a limit of one call ---------------------------------------------------------------------


@pytest.mark.parametrize("arrived", [5, 6, 50, 1000, 5000, 100_000])
def test_a_message_above_the_limit_of_its_call_is_refused_however_much_has_arrived(arrived: int) -> None:
    reader = MessageReader("identity")
    octets = framed(bytes(100_000))
    reader.feed(memoryview(octets[:arrived]))
    reader.limit(80_000)
    reader.feed(memoryview(octets[arrived:]))
    reader.end()
    text = "Received message larger than max (100000 vs. 80000)"
    assert reader.fault == MessageFault(Status.RESOURCE_EXHAUSTED, text)
    assert not reader.messages
    assert reader.direct_buffer() is None


def test_a_large_message_that_was_begun_in_one_step_is_refused_too() -> None:
    reader = MessageReader("identity")
    reader.begin_large(bytes(framing.MESSAGE_START_BYTE_SIZE), 10**9)
    reader.limit(80_000)
    assert reader.fault is not None
    assert reader.direct_buffer() is None, "no memory is taken for it"


def test_messages_within_the_limit_of_their_call_are_taken() -> None:
    reader = MessageReader("identity")
    reader.feed(memoryview(framed(b"ab")))
    reader.limit(3)
    reader.feed(memoryview(framed(b"abc")))
    assert [bytes(message) for message in reader.messages] == [b"ab", b"abc"]  # type: ignore[arg-type]
    assert reader.fault is None


def test_the_limit_of_a_call_holds_after_inflating() -> None:
    reader = MessageReader("gzip")
    reader.limit(1000)
    reader.feed(memoryview(framed(gzip.compress(bytes(1000)), 1)))
    assert reader.fault is None
    reader.feed(memoryview(framed(gzip.compress(bytes(1001)), 1)))
    assert reader.fault == MessageFault(Status.RESOURCE_EXHAUSTED, "Decompressed message larger than max (1000)")


class Memory:
    """Where waiting messages count, and how many were refused."""

    def __init__(self, limit: int) -> None:
        self.budget = ByteBudget(limit)
        self.refused = 0
        self.memory = MessageMemory(self.budget, self._full)

    def _full(self) -> MemoryFull:
        self.refused += 1
        return MemoryFull()


def test_messages_that_wait_count_until_they_are_taken_whole_and_in_part() -> None:
    lab = Memory(1 << 20)
    reader = MessageReader("identity", lab.memory)
    reader.feed(memoryview(framed(bytes(1000))))
    complete = lab.budget.used_byte_size
    assert complete >= 1000
    reader.feed(memoryview(framed(bytes(5000))[:3000]))
    assert lab.budget.used_byte_size >= complete + 2900
    reader.feed(memoryview(framed(bytes(5000))[3000:]))
    reader.take()
    reader.take()
    assert lab.budget.used_byte_size == 0


def test_what_waits_no_longer_counts_when_the_call_has_ended() -> None:
    lab = Memory(1 << 20)
    reader = MessageReader("gzip", lab.memory)
    reader.feed(memoryview(framed(bytes(1000)) + framed(gzip.compress(bytes(LOOP_BYTE_SIZE * 2)), 1) + b"\0\0\0"))
    assert lab.budget.used_byte_size > 1000
    reader.close()
    reader.close()
    assert lab.budget.used_byte_size == 0
    reader.take()
    assert lab.budget.used_byte_size == 0


def test_a_small_message_for_which_there_is_no_memory_is_forgotten_and_the_next_one_is_taken() -> None:
    lab = Memory(10_000)
    lab.budget.add(9_950)
    reader = MessageReader("identity", lab.memory)
    octets = framed(bytes(1000)) + framed(b"")
    for start in range(0, len(octets), 100):
        reader.feed(memoryview(octets[start : start + 100]))
    refused, empty = reader.take(), reader.take()
    assert isinstance(refused, RefusedMessage)
    assert isinstance(refused.error, MemoryFull)
    assert not isinstance(empty, RefusedMessage)
    assert reader.fault is None
    assert lab.refused == 1
    assert lab.budget.used_byte_size == 9_950


def test_a_call_with_many_messages_that_find_no_memory_fails() -> None:
    lab = Memory(10_000)
    lab.budget.add(9_999)
    reader = MessageReader("identity", lab.memory)
    reader.feed(memoryview(framed(b"abc") * 100_000))
    assert reader.fault is not None
    assert reader.fault.status is Status.RESOURCE_EXHAUSTED
    assert len(reader.messages) < 1000


def test_messages_that_a_limit_forgets_no_longer_count() -> None:
    lab = Memory(1 << 20)
    reader = MessageReader("identity", lab.memory)
    reader.feed(memoryview(framed(bytes(2000)) + framed(bytes(500))[:100]))
    reader.limit(1000)
    assert lab.budget.used_byte_size == 0
    reader.close()
    assert lab.budget.used_byte_size == 0

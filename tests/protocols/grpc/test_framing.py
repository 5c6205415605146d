"""Messages of gRPC: found however their bytes are cut, inflated, and refused with the right status."""

import gzip
import zlib

import pytest
from grpclib.const import Status
from hypothesis import given
from hypothesis import strategies as st

from protocols.grpc import framing
from protocols.grpc.framing import MessageFault, MessageReader


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
        patch.setattr(framing, "LARGE_BYTE_SIZE", large)
        for size in cuts:
            reader.feed(memoryview(octets[:size]))
            octets = octets[size:]
        reader.feed(memoryview(octets))
        reader.end()
    assert [bytes(message) for message in reader.messages] == messages
    assert reader.fault is None


def test_a_large_message_gets_the_place_that_its_begin_asks_for() -> None:
    content = bytes(range(256)) * (framing.LARGE_BYTE_SIZE // 256)
    place, asked = bytearray(len(content)), []

    def give(head: bytes, byte_size: int) -> memoryview:
        asked.append((head, byte_size))
        return memoryview(place)

    reader = MessageReader("identity")
    reader.place = give
    for start in range(0, len(content) + 5, 700):
        reader.feed(memoryview(framed(content)[start : start + 700]))
    assert asked == [(content[: framing.HEAD_BYTE_SIZE], len(content))]
    assert place == content
    assert [bytes(message) for message in reader.messages] == [content]


def test_what_comes_before_anybody_could_say_where_is_gathered() -> None:
    content = bytes(range(256)) * (framing.LARGE_BYTE_SIZE // 128)
    octets, place = framed(content), bytearray(len(content))
    reader = MessageReader("identity")
    reader.feed(memoryview(octets[:50_000]))
    reader.place = lambda head, byte_size: memoryview(place)
    buffer = reader.direct()
    assert buffer is not None
    assert len(buffer) == len(octets) - 50_000
    reader.feed(memoryview(octets[50_000:]))
    assert place == content
    assert [bytes(message) for message in reader.messages] == [content]


def test_a_large_message_can_be_written_where_it_belongs() -> None:
    content = bytes(range(256)) * (framing.LARGE_BYTE_SIZE // 256)
    octets = framed(content)
    reader = MessageReader("identity")
    assert reader.direct() is None
    reader.feed(memoryview(octets[:2000]))
    buffer = reader.direct()
    assert buffer is not None
    assert len(buffer) == len(octets) - 2000
    buffer[:] = octets[2000:]
    reader.filled(len(buffer))
    assert reader.direct() is None
    assert [bytes(message) for message in reader.messages] == [content]


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
        (framed(gzip.compress(b"abc")[:-4], 1), "gzip", Status.INTERNAL),
        (b"\0\x80\0\0\0", "identity", Status.RESOURCE_EXHAUSTED),
        (b"\1\x7f\xff\xff\xff", "gzip", Status.RESOURCE_EXHAUSTED),
    ],
)
def test_faults_have_the_status_that_grpc_gives_them(octets: bytes, encoding: str, status: Status) -> None:
    reader = read(octets + framed(b"more"), encoding)
    assert reader.fault is not None
    assert reader.fault.status is status
    assert not reader.messages


def test_a_message_that_inflates_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_INFLATED_BYTE_SIZE", 1000)
    assert read(framed(gzip.compress(bytes(1000)), 1), "gzip").fault is None
    assert read(framed(gzip.compress(bytes(1001)), 1), "gzip").fault == MessageFault(
        Status.RESOURCE_EXHAUSTED, "Decompressed message larger than max (1000)"
    )


def test_a_message_is_refused_by_its_announced_size_before_it_comes() -> None:
    assert read(b"\0\x80\0\0\0").fault == MessageFault(
        Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({2**31} vs. {2**31 - 1})"
    )

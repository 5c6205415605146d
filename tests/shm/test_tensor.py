"""The one tensor type: where its bytes are, and how it travels in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import pytest

from shm.arena import Arena
from shm.lease import RegionNumber
from shm.region import Region, RegionKind
from shm.tensor import ClientSpan, RequestedOutput, Span, Tensor, decode_lease, encode_lease
from tests.leased_tensor import leased_tensor
from tests.shm.regions import memfd_region

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = TypeVar("Kind")

ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_lease)


def decoded(kind: type[Kind], value: object) -> Kind:
    """Return `value` as the other side of a connection gets it."""
    return msgspec.msgpack.Decoder(kind, dec_hook=decode_lease).decode(ENCODER.encode(value))


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena("test", 1 << 16) as made:
        yield made


@pytest.fixture
def region_of_client() -> Iterator[Region]:
    with memfd_region(RegionKind.SYSTEM, 4096) as made:
        yield made


# ---- messages -------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\0\0\x80?", memoryview(b"\0\0\x80?"), bytearray(b"\0\0\x80?")])
def test_an_inline_tensor_arrives_as_it_was_sent(data: bytes | memoryview | bytearray) -> None:
    received = decoded(Tensor, Tensor("IN", "FP32", [1, 1], data))
    assert received == Tensor("IN", "FP32", [1, 1], b"\0\0\x80?")
    assert type(received.data) is bytes


def test_of_a_span_the_number_of_its_region_arrives(arena: Arena) -> None:
    block = arena.take(5000)
    assert block is not None
    received = decoded(Tensor, Tensor("IN", "UINT8", [5000], span=block.span))
    assert received.span is not None
    assert received.span.lease.region_number == arena.region.number
    assert (received.span.offset, received.span.byte_size) == (block.offset, 5000)
    received.release()
    assert arena.allocator.block_count == 1, "the sender holds the lease"
    again = decoded(Tensor, received)
    assert again.span is not None
    assert again.span.lease.region_number == arena.region.number
    block.release()


def test_a_requested_output_arrives_with_its_place() -> None:
    wanted = RequestedOutput("OUT", 0, Span(RegionNumber(3), 64, 16))
    received = decoded(RequestedOutput, wanted)
    assert received.span is not None
    assert (received.name, received.span.lease.region_number, received.span.offset, received.span.byte_size) == (
        "OUT", 3, 64, 16,
    )  # fmt: skip
    assert decoded(RequestedOutput, RequestedOutput("OUT", 5)) == RequestedOutput("OUT", 5)


@pytest.mark.parametrize("lease", ["one", 1.5, True, None, [1]])
def test_anything_but_a_number_in_place_of_a_lease_is_refused(lease: object) -> None:
    message = msgspec.msgpack.encode(["IN", "FP32", [1], None, [lease, 0, 4]])
    with pytest.raises(msgspec.ValidationError, match="is not the number of a region"):
        msgspec.msgpack.Decoder(Tensor, dec_hook=decode_lease).decode(message)


def test_only_leases_are_numbers_in_messages() -> None:
    with pytest.raises(ValueError, match="1 is not the number of a region"):
        decode_lease(int, 1)
    with pytest.raises(NotImplementedError, match="a message cannot contain a object"):
        encode_lease(object())


# ---- places ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "byte_size", "within"),
    [
        (100, 50, True),
        (100, 0, True),
        (150, 0, True),
        (120, 30, True),
        (99, 1, False),
        (100, 51, False),
        (149, 2, False),
        (150, 1, False),
        (100, -1, False),
        (0, 4096, False),
    ],
)
def test_a_span_holds_what_lies_within_it(offset: int, byte_size: int, within: bool) -> None:
    assert Span(RegionNumber(1), 100, 50).holds(offset, byte_size) is within


def test_a_shared_span_has_a_lease_of_its_own(region_of_client: Region) -> None:
    span = Span(region_of_client.lease(), 8, 16)
    other = span.shared()
    assert (other.offset, other.byte_size) == (8, 16)
    span.lease.release()
    assert region_of_client.lease_count == 1
    other.lease.release()


def test_a_span_of_a_client_is_named_as_the_client_names_it(arena: Arena, region_of_client: Region) -> None:
    span = Span(region_of_client.lease(), 8, 16)
    assert span.of_client == ClientSpan("r", 16, 8)
    block = arena.take(16)
    assert block is not None
    assert block.span.of_client is None
    span.lease.release()
    block.release()


def test_a_tensor_of_a_client_is_in_its_region_before_and_after_it_is_leased(region_of_client: Region) -> None:
    named = ClientSpan("r", 16, 8)
    span = Span(region_of_client.lease(), 8, 16)
    for each in (Tensor("A", "FP32", [4], client_span=named), Tensor("A", "FP32", [4], span=span)):
        assert each.region_of_client == named
        assert each.byte_size == 16
    for wanted in (RequestedOutput("A", client_span=named), RequestedOutput("A", span=span)):
        assert wanted.region_of_client == named
    span.lease.release()


def test_other_tensors_are_in_no_region_of_a_client(arena: Arena) -> None:
    block = arena.take(16)
    assert block is not None
    assert Tensor("A", "FP32", [4], bytes(16)).region_of_client is None
    assert Tensor("A", "FP32", [4], span=block.span).region_of_client is None
    assert RequestedOutput("A").region_of_client is None
    block.release()


def test_the_byte_size_is_that_of_the_place() -> None:
    assert Tensor("A", "BYTES", [2], memoryview(b"123456789")).byte_size == 9
    assert Tensor("A", "FP32", [4], span=Span(RegionNumber(1), 0, 16)).byte_size == 16
    assert Tensor("A", "FP32", [4]).byte_size == 0


# ---- bytes ----------------------------------------------------------------------------------


def test_the_bytes_of_an_output_are_those_in_the_message_or_in_the_arena(arena: Arena) -> None:
    block = arena.take(5)
    assert block is not None
    block.view()[:] = b"bytes"
    for tensor in (Tensor("A", "UINT8", [5], b"bytes"), Tensor("A", "UINT8", [5], span=block.span)):
        assert bytes(tensor.raw()) == b"bytes"
        assert bytes(tensor.response_bytes() or b"") == b"bytes"
    block.release()


def test_an_output_in_a_region_of_a_client_has_no_bytes_for_the_response(region_of_client: Region) -> None:
    span = Span(region_of_client.lease(), 0, 16)
    assert Tensor("A", "FP32", [4], span=span).response_bytes() is None
    assert Tensor("A", "FP32", [4], client_span=ClientSpan("r", 16)).response_bytes() is None
    with pytest.raises(AssertionError, match="region r belongs to a client"):
        Tensor("A", "FP32", [4], span=span).raw()
    span.lease.release()


def test_bytes_that_are_not_here_are_an_error() -> None:
    with pytest.raises(AssertionError, match="tensor 'A' has no bytes in this process"):
        Tensor("A", "FP32", [4], client_span=ClientSpan("r", 16)).raw()
    with pytest.raises(AssertionError, match="tensor 'A' has no bytes in this process"):
        Tensor("A", "FP32", [4], span=Span(RegionNumber(1), 0, 16)).as_numpy()


def test_an_array_is_a_view_and_writable_where_the_bytes_are() -> None:
    memory = bytearray(np.arange(4, dtype=np.float32).tobytes())
    array = Tensor("A", "FP32", [2, 2], memoryview(memory)).as_numpy()
    array[1, 1] = 7
    assert np.frombuffer(memory, np.float32).tolist() == [0, 1, 2, 7]
    assert not Tensor("A", "FP32", [4], bytes(memory)).as_numpy().flags.writeable
    assert Tensor("A", "BYTES", [1], b"\1\0\0\0a").as_numpy().tolist() == [b"a"]


def test_a_tensor_is_released_with_its_place() -> None:
    released: list[str] = []
    tensor = leased_tensor("A", "UINT8", [3], b"abc", lambda: released.append("A"))
    assert bytes(tensor.raw()) == b"abc"
    tensor.release()
    tensor.release()
    assert released == ["A"]
    Tensor("A", "UINT8", [3], b"abc").release()

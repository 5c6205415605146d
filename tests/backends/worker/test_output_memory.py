"""Memory for large outputs: an arena that is shared, or copies that are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from backends.transport import wire
from backends.worker.output_memory import ArenaOutputs, SentOutputs
from kernel.errors import ArenaFull
from shm.tensor import Tensor

if TYPE_CHECKING:
    from shm.arena import Arena


def test_the_arena_is_made_with_the_first_output_and_blocks_come_back() -> None:
    made: list[Arena] = []
    outputs = ArenaOutputs(made.append)
    outputs.byte_size = 1 << 16
    assert outputs.arena is None
    span, view = outputs.take(5000)
    view[:] = b"x" * 5000
    assert outputs.owns(span)
    assert made == [outputs.arena]
    with pytest.raises(ArenaFull):
        outputs.take(1 << 16)
    outputs.free([span.offset])
    whole, _ = outputs.take(1 << 16)
    outputs.drop(whole)
    assert made[0].allocator.block_count == 0
    made[0].close()


def test_an_output_is_sent_in_chunks_before_the_response_that_names_it() -> None:
    sent: list[wire.ToKernel] = []
    outputs = SentOutputs(sent.append)
    span, view = outputs.take(wire.CHUNK_BYTE_SIZE + 10)
    view[:] = bytes(wire.CHUNK_BYTE_SIZE) + b"0123456789"
    outputs.publish([Tensor("SMALL", "UINT8", [1], b"a"), Tensor("OUT", "UINT8", [len(view)], None, span)])
    transfer, first, last = sent
    number = span.lease.region_number
    assert number >= wire.FIRST_TRANSFER_OF_WORKER
    assert transfer == wire.Transfer(number, len(view))
    assert isinstance(first, wire.Chunk)
    assert isinstance(last, wire.Chunk)
    assert (first.number, first.offset, bytes(first.data)) == (number, 0, bytes(wire.CHUNK_BYTE_SIZE))
    assert (last.number, last.offset, bytes(last.data)) == (number, wire.CHUNK_BYTE_SIZE, b"0123456789")


def test_small_outputs_of_a_response_are_sent_with_it() -> None:
    sent: list[wire.ToKernel] = []
    outputs = SentOutputs(sent.append)
    tensors = []
    for number, byte_size in enumerate((wire.SENT_INLINE_BYTE_SIZE - 10, 20, 10)):
        span, view = outputs.take(byte_size)
        view[:] = bytes([number]) * byte_size
        tensors.append(Tensor("OUT", "UINT8", [byte_size], None, span))
    outputs.publish(tensors)
    first, second, third = tensors
    assert (first.span, third.span) == (None, None)
    assert (bytes(first.raw()), bytes(third.raw())) == (bytes(wire.SENT_INLINE_BYTE_SIZE - 10), bytes([2]) * 10)
    assert second.data is None, "together with the first one it is too large"
    assert second.span is not None
    transfer, chunk = sent
    assert transfer == wire.Transfer(second.span.lease.region_number, 20)
    assert isinstance(chunk, wire.Chunk)
    assert bytes(chunk.data) == bytes([1]) * 20


def test_what_no_response_names_is_forgotten_unsent() -> None:
    sent: list[wire.ToKernel] = []
    outputs = SentOutputs(sent.append)
    outputs.byte_size = 100
    dropped, _ = outputs.take(100)
    outputs.drop(dropped)
    with pytest.raises(ArenaFull):
        outputs.take(101)
    kept, _ = outputs.take(100)
    assert kept.lease.region_number != dropped.lease.region_number
    assert sent == []

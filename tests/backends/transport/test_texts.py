"""Texts of models: whatever they hold can be sent, and none is longer than a text may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.transport import wire
from backends.transport.texts import MAX_TEXT_BYTES, encodable, shortened
from shm.lease import RegionNumber
from shm.tensor import Span, Tensor

LONE = "file\udcff"
ESCAPED = "file\\udcff"


def test_a_lone_surrogate_becomes_an_escape_wherever_it_is() -> None:
    place = Span(RegionNumber(3), 4, 5)
    response = wire.ResponseMessage(
        [Tensor(LONE, "BYTES", [1], b"\xff", None), Tensor("b", "FP32", [2], None, place)],
        {LONE: LONE, "n": 7, "x": 1.5, "b": True},
        "internal",
        LONE,
    )
    sent = wire.encoder.encode(encodable(wire.Responded(9, True, response)))
    received = wire.to_kernel_decoder.decode(sent)
    assert isinstance(received, wire.Responded)
    assert received.response is not None
    assert (received.request, received.final, received.response.error_text) == (9, True, ESCAPED)
    assert received.response.parameters == {ESCAPED: ESCAPED, "n": 7, "x": 1.5, "b": True}
    assert [(tensor.name, tensor.data) for tensor in received.response.outputs] == [(ESCAPED, b"\xff"), ("b", None)]
    span = received.response.outputs[1].span
    assert span is not None
    assert (span.lease.region_number, span.offset, span.byte_size) == (3, 4, 5)


def test_what_can_be_encoded_stays_as_it_is() -> None:
    message = wire.Executed(1, [wire.ResponseMessage(error_code="internal", error_text="naïve 🙂 \\udcff")], 2, 3, 4, 5)
    assert encodable(message) == message


@given(st.text(st.characters()))
def test_every_text_can_be_sent(text: str) -> None:
    wire.encoder.encode(encodable(wire.Log("INFO", text)))


@pytest.mark.parametrize("character", ["a", "é", "🙂", "\udcff"])
def test_a_long_text_is_cut_and_says_how_long_it_was(character: str) -> None:
    text = character * 300_000
    cut = shortened(text)
    assert cut.endswith("… (cut: the whole text has 300000 characters)")
    byte_size = len(encodable(cut).encode())
    assert MAX_TEXT_BYTES - 8 < byte_size <= MAX_TEXT_BYTES


@pytest.mark.parametrize("text", ["", "short", "a" * MAX_TEXT_BYTES, "é" * (MAX_TEXT_BYTES // 2)])
def test_a_text_that_is_short_enough_is_not_cut(text: str) -> None:
    assert shortened(text) == text

"""The key of a request: equal only where the model could not tell two requests apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.serving.request import NO_SINK, Request
from kernel.serving.request_key import KEY_BYTE_SIZE, describe, digest, inputs_in_order
from shm.tensor import ClientSpan, RequestedOutput, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def request(**more: object) -> Request:
    inputs = [Tensor("A", "INT32", [2], b"\1\0\0\0\2\0\0\0"), Tensor("B", "BOOL", [1], b"\1")]
    return Request("m", inputs, NO_SINK, **more)  # type: ignore[arg-type]


def key(of: Request, salt: bytes = b"load") -> bytes:
    return digest(describe(of, salt), [each.raw() for each in inputs_in_order(of)])


def test_id_priority_timeout_and_the_order_of_inputs_do_not_count() -> None:
    other = request(id="7", priority=2, timeout_us=5, streaming=True)
    other.inputs.reverse()
    assert key(other) == key(request())
    assert len(key(other)) == KEY_BYTE_SIZE


def _change(what: str, value: object) -> Callable[[Request], None]:
    def change(of: Request) -> None:
        setattr(of.inputs[0], what, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _change("name", "C"),
        _change("datatype", "FP32"),
        _change("shape", [1, 2]),
        _change("shape", [2, 1]),
        _change("data", b"\1\0\0\0\3\0\0\0"),
        _change("data", b"\1\0\0\0"),
    ],
)
def test_all_of_an_input_counts(change: Callable[[Request], None]) -> None:
    other = request()
    change(other)
    assert key(other) != key(request())


@pytest.mark.parametrize(
    "more",
    [
        {"parameters": {"a": 1}},
        {"parameters": {"a": True}},
        {"parameters": {"a": 1.0}},
        {"parameters": {"a": "1"}},
        {"outputs": [RequestedOutput("X")]},
        {"outputs": [RequestedOutput("X", 1)]},
        {"outputs": [RequestedOutput("X"), RequestedOutput("Y")]},
        {"correlation_id": 1},
        {"correlation_id": "1"},
        {"sequence_start": True},
        {"sequence_end": True},
    ],
)
def test_parameters_outputs_and_sequences_count(more: dict[str, object]) -> None:
    keys = {key(request()), key(request(**more))}
    assert len(keys) == 2


def test_values_of_different_types_are_different_parameters() -> None:
    values: list[object] = [1, True, 1.0, "1"]
    assert len({key(request(parameters={"a": value})) for value in values}) == len(values)


def test_the_order_of_parameters_does_not_count() -> None:
    assert key(request(parameters={"a": 1, "b": 2})) == key(request(parameters={"b": 2, "a": 1}))


def test_where_an_output_goes_does_not_count() -> None:
    here = request(outputs=[RequestedOutput("X")])
    there = request(outputs=[RequestedOutput("X", client_span=ClientSpan("region", 8))])
    assert key(here) == key(there)


def test_the_load_of_the_model_counts() -> None:
    assert key(request(), b"one") != key(request(), b"two")


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=4), st.lists(st.binary(max_size=6), min_size=1, max_size=4))
def test_bytes_cannot_move_from_one_input_to_another(one: list[bytes], other: list[bytes]) -> None:
    def with_contents(contents: list[bytes]) -> bytes:
        inputs = [Tensor(f"I{i}", "UINT8", [len(data)], data) for i, data in enumerate(contents)]
        return key(Request("m", inputs, NO_SINK))

    assert (with_contents(one) == with_contents(other)) is (one == other)

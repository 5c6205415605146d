"""Batches: which of their entries are requests, and by which numbers the worker knows them."""

from __future__ import annotations

from kernel.serving.batch import Batch
from kernel.serving.request import Request
from kernel.testing import RecordingSink


def request(id: str) -> Request:
    return Request("m", [], RecordingSink(), id=id)


def test_the_requests_of_a_batch_have_consecutive_numbers() -> None:
    a, b, c = (request(id) for id in "abc")
    batch = Batch([a, b, c], first_request_number=7)
    assert batch.requests == [a, b, c]
    assert list(batch.request_numbers()) == [7, 8, 9]


def test_padding_has_a_number_and_no_request() -> None:
    a, b = request("a"), request("b")
    batch = Batch([None, a, None, b], slots=[0, 1, 2, 3], first_request_number=4)
    assert batch.requests == [a, b]
    assert list(batch.request_numbers()) == [5, 7]


def test_a_batch_of_sequences_may_have_no_padding_or_nothing_else() -> None:
    a, b = request("a"), request("b")
    full = Batch([a, b], slots=[1, 0], first_request_number=1)
    assert (full.requests, list(full.request_numbers())) == ([a, b], [1, 2])
    empty = Batch([None, None], slots=[0, 1], first_request_number=1)
    assert (empty.requests, list(empty.request_numbers())) == ([], [])


def test_a_batch_without_sequences_is_its_requests_without_a_copy() -> None:
    batch = Batch([request("a")])
    assert batch.requests is batch.entries

"""Requests that have ended workers are remembered by what they contain, and equal ones are refused."""

from __future__ import annotations

import pytest

from kernel.errors import PoisonRequest
from kernel.isolation import poison
from kernel.isolation.poison import PoisonGuard
from kernel.serving.batch import BegunBatch
from kernel.serving.request import NO_SINK, Request
from shm.tensor import ClientSpan, Tensor


def request(content: bytes = b"abcd", id: str = "") -> Request:
    return Request("model", [Tensor("IN", "FP32", [1], content)], NO_SINK, id=id)


def found(guard: PoisonGuard, *requests: Request) -> None:
    for each in requests:
        for _ in range(2):
            guard.judge([BegunBatch([each], True)])


def test_an_equal_request_is_refused_whatever_its_id_and_another_is_not() -> None:
    guard = PoisonGuard("model")
    assert not guard.remembers
    guard.check(request())
    found(guard, request(id="first"))
    assert guard.remembers
    with pytest.raises(PoisonRequest, match="has ended workers of model 'model' before"):
        guard.check(request(id="second"))
    guard.check(request(b"abce"))
    guard.check(Request("model", [Tensor("OTHER", "FP32", [1], b"abcd")], NO_SINK))
    assert (guard.found_count, guard.refused_count) == (1, 1)


def test_no_digest_is_computed_of_a_request_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = PoisonGuard("model")
    found(guard, request())

    def unwanted(*_: object) -> None:
        raise AssertionError("a digest was computed")

    monkeypatch.setattr(poison, "digest", unwanted)
    guard.check(Request("model", [Tensor("IN", "FP32", [2], b"abcdabcd")], NO_SINK))


def test_what_is_remembered_is_bounded_and_can_be_cleared() -> None:
    guard = PoisonGuard("model")
    found(guard, *(request(number.to_bytes(4)) for number in range(poison.MOST_REMEMBERED + 1)))
    assert len(guard) == poison.MOST_REMEMBERED
    guard.check(request((0).to_bytes(4)))
    with pytest.raises(PoisonRequest):
        guard.check(request((1).to_bytes(4)))
    assert guard.clear() == poison.MOST_REMEMBERED
    guard.check(request((1).to_bytes(4)))


def test_large_requests_and_those_with_regions_of_clients_are_not_remembered() -> None:
    guard = PoisonGuard("model")
    large = Request("model", [Tensor("IN", "FP32", [1], bytes(poison.MOST_BYTES + 1))], NO_SINK)
    client_span = ClientSpan("region", 0, 4)
    in_region = Request("model", [Tensor("IN", "FP32", [1], None, None, client_span)], NO_SINK)
    found(guard, large, in_region)
    assert not guard.remembers
    assert guard.found_count == 2

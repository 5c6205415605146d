"""Requests that are answered in threads of their own: what they get, and when the threads end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.streaming import StreamingBackend
from backends.worker.message_reader import KernelGone
from backends.worker.request import OutputValue
from kernel.errors import InternalError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from backends.base import Host, ModelArguments, Timings
    from backends.worker.request import WorkerRequest
    from kernel.errors import ServingError
    from tests.backends.conftest import Lab

    Responses = Iterator[Sequence[OutputValue] | ServingError]

OUTPUTS = [OutputValue("OUT", "INT32", np.ones(1, np.int32))]
FOREVER_S = 1e9


class Answering(StreamingBackend):
    """Answers as it is told."""

    def __init__(self, host: Host, answer: Callable[[Answering, WorkerRequest], Responses]) -> None:
        super().__init__(host)
        self._how = answer

    def load(self, arguments: ModelArguments) -> None:
        """Nothing to load."""

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        for request in requests:
            self.answer(request)

    def responses(self, request: WorkerRequest) -> Responses:
        return self._how(self, request)


def executed(lab: Lab, how: Callable[[Answering, WorkerRequest], Responses]) -> WorkerRequest:
    """Return a request that was answered, after the threads have ended."""
    backend = Answering(lab, how)
    request = lab.request({})
    backend.execute([request], lab.timings)
    for thread in list(backend._threads):
        thread.join()
    return request


def test_the_last_response_is_followed_by_the_end(lab: Lab) -> None:
    request = executed(lab, lambda backend, request: iter([OUTPUTS, OUTPUTS]))
    assert lab.answer(request)["OUT"].tolist() == [1]
    assert executed(lab, lambda backend, request: iter(())).finished


def test_an_error_may_be_one_response_among_others(lab: Lab) -> None:
    request = executed(lab, lambda backend, request: iter([InvalidArgument("this one"), OUTPUTS]))
    assert lab.error(request).message == "this one"
    assert lab.answer(request)["OUT"].tolist() == [1]


def test_what_is_raised_ends_the_request(lab: Lab) -> None:
    def refuse(backend: Answering, request: WorkerRequest) -> Responses:
        yield OUTPUTS
        raise InvalidArgument("no more")

    def fail(backend: Answering, request: WorkerRequest) -> Responses:
        yield OUTPUTS
        raise ValueError("a bug")

    assert isinstance(lab.error(executed(lab, refuse)), InvalidArgument)
    error = lab.error(executed(lab, fail))
    assert isinstance(error, InternalError)
    assert error.message == "ValueError: a bug"


def test_a_client_that_has_gone_ends_the_request(lab: Lab) -> None:
    asked: list[WorkerRequest] = []
    lab.is_cancelled = lambda request: bool(asked)  # type: ignore[method-assign]

    def endless(backend: Answering, request: WorkerRequest) -> Responses:
        while True:
            asked.append(request)
            backend.pause(request, FOREVER_S)
            yield OUTPUTS

    assert executed(lab, endless).finished
    assert len(asked) == 1


def test_the_end_of_the_worker_ends_pauses(lab: Lab) -> None:
    def slow(backend: Answering, request: WorkerRequest) -> Responses:
        backend.pause(request, FOREVER_S)
        yield OUTPUTS

    backend = Answering(lab, slow)
    request = lab.request({})
    backend.execute([request], lab.timings)
    backend.finalize()
    assert request.finished
    assert not backend._threads


def test_a_kernel_that_has_gone_is_not_answered(lab: Lab) -> None:
    def gone(backend: Answering, request: WorkerRequest) -> Responses:
        yield OUTPUTS
        raise KernelGone

    assert not executed(lab, gone).finished

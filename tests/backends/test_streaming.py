"""Requests that have their own threads: their responses, and the end of the threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.streaming import StreamingBackend
from backends.transport import wire
from backends.worker.message_reader import KernelGone
from backends.worker.request import OutputValue
from kernel.errors import InternalError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from backends.base import Host, ModelArguments, Timings
    from backends.worker.request import WorkerRequest
    from kernel.errors import ServingError
    from tests.backends.conftest import Lab

    Responses = Iterator[Sequence[OutputValue] | ServingError | None]

OUTPUTS = [OutputValue("OUT", "INT32", np.ones(1, np.int32))]
FOREVER_S = 1e9


class FunctionBackend(StreamingBackend):
    """A streaming backend whose responses come from a function."""

    def __init__(self, host: Host, function: Callable[[FunctionBackend, WorkerRequest], Responses]) -> None:
        super().__init__(host)
        self._function = function

    def load(self, arguments: ModelArguments) -> None:
        """Do nothing."""

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        for request in requests:
            self.respond_in_thread(request)

    def responses(self, request: WorkerRequest) -> Responses:
        return self._function(self, request)


def executed(lab: Lab, function: Callable[[FunctionBackend, WorkerRequest], Responses]) -> WorkerRequest:
    """Execute a request, wait until its thread has ended, and return the request."""
    backend = FunctionBackend(lab, function)
    request = lab.request({})
    backend.execute([request], lab.timings)
    for thread in list(backend.threads):
        thread.join()
    return request


def test_a_request_is_finished_after_the_last_response(lab: Lab) -> None:
    request = executed(lab, lambda backend, request: iter([OUTPUTS, OUTPUTS]))
    assert lab.outputs(request)["OUT"].tolist() == [1]
    assert executed(lab, lambda backend, request: iter(())).finished


def test_responses_may_follow_an_error(lab: Lab) -> None:
    request = executed(lab, lambda backend, request: iter([InvalidArgument("this one"), OUTPUTS]))
    assert lab.error(request).message == "this one"
    assert lab.outputs(request)["OUT"].tolist() == [1]


def test_every_response_is_reported_with_what_became_of_it(lab: Lab) -> None:
    def respond(backend: FunctionBackend, request: WorkerRequest) -> Responses:
        yield OUTPUTS
        yield InvalidArgument("this one")
        yield None
        raise ValueError("a bug")

    executed(lab, respond)
    lab.collector.flush()
    [message] = lab.reported
    assert isinstance(message, wire.Reported)
    assert [(each.index, each.outcome) for each in message.responses] == [
        (0, "success"), (1, "fail"), (2, "empty_response"), (3, "fail"),
    ]  # fmt: skip
    assert lab.logged == []


def test_an_exception_is_the_last_response(lab: Lab) -> None:
    def refuse(backend: FunctionBackend, request: WorkerRequest) -> Responses:
        yield OUTPUTS
        raise InvalidArgument("no more")

    def fail(backend: FunctionBackend, request: WorkerRequest) -> Responses:
        yield OUTPUTS
        raise ValueError("a bug")

    assert isinstance(lab.error(executed(lab, refuse)), InvalidArgument)
    error = lab.error(executed(lab, fail))
    assert isinstance(error, InternalError)
    assert error.message == "ValueError: a bug"


def test_cancellation_ends_the_request(lab: Lab) -> None:
    resumed: list[WorkerRequest] = []
    lab.is_cancelled = lambda request: bool(resumed)  # type: ignore[method-assign]

    def endless(backend: FunctionBackend, request: WorkerRequest) -> Responses:
        while True:
            resumed.append(request)
            backend.pause(request, FOREVER_S)
            yield OUTPUTS

    assert executed(lab, endless).finished
    assert len(resumed) == 1


def test_the_end_of_the_worker_ends_pauses(lab: Lab) -> None:
    def slow(backend: FunctionBackend, request: WorkerRequest) -> Responses:
        backend.pause(request, FOREVER_S)
        yield OUTPUTS

    backend = FunctionBackend(lab, slow)
    request = lab.request({})
    backend.execute([request], lab.timings)
    backend.finalize()
    assert request.finished
    assert not backend.threads


def test_after_the_kernel_has_gone_no_response_is_sent(lab: Lab) -> None:
    def gone(backend: FunctionBackend, request: WorkerRequest) -> Responses:
        yield OUTPUTS
        raise KernelGone

    assert not executed(lab, gone).finished

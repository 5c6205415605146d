"""What a worker does with each message: the model is loaded, batches are executed, and every failure is said."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.transport import wire
from backends.transport.outbox import Progress
from backends.worker.loop import Worker
from backends.worker.request import OutputValue
from kernel.errors import BadConfig, Unavailable
from shm.tensor import Tensor
from tests.backends.worker.threaded_worker import (
    CONFIG,
    LARGE,
    LOAD,
    Bench,
    RespondingLater,
    Scripted,
    echo,
    request,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Config, ModelArguments
    from backends.worker.request import WorkerRequest


# ---- the model ------------------------------------------------------------------------------


def test_the_first_message_says_who_the_worker_is(bench: Bench) -> None:
    hello = bench.hello()
    assert (hello.protocol, hello.pid, hello.local) == (wire.PROTOCOL, os.getpid(), True)
    assert 0 < hello.now_ns <= time.monotonic_ns()
    bench.stop()


def test_a_model_is_loaded_with_what_the_kernel_says_of_it(bench: Bench) -> None:
    backend = bench.load()
    arguments = backend.loaded
    assert arguments is not None
    assert (arguments.model_name, str(arguments.version_dir), arguments.instance_name) == ("m", "/models/m/1", "m_0")
    bench.stop()
    assert backend.finalized == 1


def test_a_configuration_is_completed_by_the_backend_that_then_loads_the_model(bench: Bench) -> None:
    bench.hello()
    bench.send(wire.Complete(CONFIG, "/models/m", 1))
    assert bench.next(wire.Completed).config == '{"name":"m","backend":"scripted","max_batch_size":4}'
    completing = bench.backend
    bench.send(LOAD)
    loaded = bench.next(wire.Loaded)
    assert loaded.concurrency == 1
    assert loaded.load_ns > 0
    assert bench.backend is completing
    bench.stop()


@pytest.mark.parametrize("message", [LOAD, wire.Complete(CONFIG, "/models/m", 1)])
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (BadConfig("the model wants more"), "invalid_arg", "the model wants more"),
        (Unavailable("no device"), "unavailable", "no device"),
        (ZeroDivisionError("division by zero"), "internal", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(
    bench: Bench, message: wire.ToWorker, error: Exception, code: str, text: str
) -> None:
    def fail() -> None:
        raise error

    bench.on_load = fail
    bench.hello()
    bench.send(message)
    assert bench.next(wire.LoadFailed) == wire.LoadFailed(code, text)
    bench.stop()


@pytest.mark.parametrize(
    "message",
    [
        wire.Load(CONFIG, "/models/m", 1, "m_0", protocol="13 of 0.0.9"),
        wire.Complete(CONFIG, "/models/m", 1, protocol="13 of 0.0.9"),
        wire.AskGpu(CONFIG, "/models/m", 1, protocol="13 of 0.0.9"),
    ],
)
def test_a_kernel_of_another_version_is_refused(bench: Bench, message: wire.ToWorker) -> None:
    bench.hello()
    bench.send(message)
    failed = bench.next(wire.LoadFailed)
    assert "it sent version 13 of 0.0.9, expected version" in failed.text
    bench.stop()


def test_a_worker_whose_kernel_is_gone_ends_without_finalizing(bench: Bench) -> None:
    backend = bench.load()
    bench.leave()
    assert backend.finalized == 0


def test_a_worker_without_a_model_stops(bench: Bench) -> None:
    bench.hello()
    bench.stop()
    assert bench.backend is None


def test_lines_of_the_model_are_logged_by_the_kernel_verbose_ones_only_when_asked_for(bench: Bench) -> None:
    backend = bench.load()
    backend.host.log("VERBOSE", "not shown")
    backend.host.log("ERROR", "shown")
    assert bench.next(wire.Log) == wire.Log("ERROR", "shown")
    bench.stop()


def test_a_text_of_the_model_that_cannot_be_encoded_or_is_too_long_is_sent_all_the_same(bench: Bench) -> None:
    backend = bench.load()
    backend.host.log("INFO", "file\udcff")
    assert bench.next(wire.Log).text == "file\\udcff"
    backend.host.log("INFO", "x" * 1_000_000)
    line = bench.next(wire.Log).text
    assert len(line.encode()) == 1 << 16
    assert line.endswith("… (cut: the whole text has 1000000 characters)")
    bench.stop()


def test_a_configuration_that_is_too_long_for_a_message_fails_the_load(bench: Bench) -> None:
    class Verbose(Scripted):
        def complete(self, arguments: ModelArguments) -> Config:
            return {**arguments.config, "parameters": {"text": {"string_value": "x" * (1 << 24)}}}

    bench.hello()
    bench.kind = Verbose
    bench.send(wire.Complete(CONFIG, "/models/m", 1))
    failed = bench.next(wire.LoadFailed)
    assert failed.text.startswith("the completed configuration is too long: a message of ")
    bench.stop()


# ---- executing ------------------------------------------------------------------------------


def test_the_kernel_sees_which_batch_is_read_and_which_one_the_model_has(bench: Bench) -> None:
    seen: list[Progress] = []

    def execute(requests: Sequence[WorkerRequest]) -> None:
        seen.append(bench.outbox.progress())
        echo(requests)

    bench.load(execute)
    assert bench.outbox.progress() == Progress(0, False)
    bench.send(wire.Execute(5, [request(8)]))
    bench.next(wire.Executed)
    bench.send(wire.Cancel([9]), wire.Execute(6, [request(9)]))  # no request is left for the model
    bench.next(wire.Executed)
    assert seen == [Progress(5, True)]
    assert bench.outbox.progress() == Progress(6, False)
    bench.stop()


@pytest.mark.parametrize(
    "text", ["file\udcff", "x" * 50_000_000, "é" * 1_000_000], ids=["lone surrogate", "50 MB", "2 MB"]
)
def test_an_error_with_any_text_fails_its_request_and_nothing_else(bench: Bench, text: str) -> None:
    def fail(requests: Sequence[WorkerRequest]) -> None:
        raise Unavailable(text)

    backend = bench.load(fail)
    bench.send(wire.Execute(1, [request(1)]))
    [response] = bench.next(wire.Executed).responses
    assert len(response.error_text.encode()) <= 1 << 16
    assert (response.error_text == "file\\udcff") if "file" in text else ("the whole text has" in response.error_text)
    backend.on_execute = echo
    bench.send(wire.Execute(2, [request(2)]))
    assert bench.next(wire.Executed).responses[0].outputs
    bench.stop()


def test_responses_that_are_too_long_for_one_message_are_sent_one_by_one(bench: Bench) -> None:
    def execute(requests: Sequence[WorkerRequest]) -> None:
        for number, each in enumerate(requests):
            output = [OutputValue("OUT", "FP32", LARGE if number == 2 else each.inputs[0].as_numpy())]
            each.respond(output, {"text": "x" * (1 << 25 if number == 2 else 6_000_000)})

    bench.load(execute)
    bench.send(wire.Execute(1, [request(number) for number in (1, 2, 3)]))
    bench.next(wire.ArenaCreated)
    os.close(bench.channel.take_fd())
    for number in (1, 2):
        responded = bench.next(wire.Responded)
        assert (responded.request, responded.final) == (number, True)
        assert responded.response is not None
        assert len(str(responded.response.parameters["text"])) == 6_000_000
    refused = bench.next(wire.Responded)
    assert refused.response is not None
    assert refused.response.error_text.startswith("the response is too long for the server: a message of ")
    executed = bench.next(wire.Executed)
    assert (executed.batch, executed.responses) == (1, [])
    bench.stop()


def test_the_responses_of_a_batch_come_with_its_end_in_order(bench: Bench) -> None:
    bench.load()
    bench.send(wire.Execute(5, [request(8, b"aaaabbbb"), request(9, b"ccccdddd")]))
    executed = bench.next(wire.Executed)
    assert executed.batch == 5
    assert [response.outputs for response in executed.responses] == [
        [Tensor("OUT", "FP32", [2], b"aaaabbbb")],
        [Tensor("OUT", "FP32", [2], b"ccccdddd")],
    ]
    bench.stop()


def test_times_are_those_of_the_machine_and_in_order(bench: Bench) -> None:
    modelled: list[int] = []

    def execute(requests: Sequence[WorkerRequest]) -> None:
        modelled.append(time.monotonic_ns())
        echo(requests)
        modelled.append(time.monotonic_ns())

    bench.load(execute)
    before_ns = time.monotonic_ns()
    bench.send(wire.Execute(1, [request(1)]))
    executed = bench.next(wire.Executed)
    times = [
        before_ns,
        executed.compute_start_ns,
        executed.input_end_ns,
        *modelled,
        executed.output_start_ns,
        executed.compute_end_ns,
        time.monotonic_ns(),
    ]
    assert times == sorted(times)
    bench.stop()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (Unavailable("busy"), "unavailable", "busy"),
        (ZeroDivisionError("division by zero"), "internal", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_exception_of_the_model_fails_the_requests_that_have_no_response(
    bench: Bench, error: Exception, code: str, text: str
) -> None:
    def execute(requests: Sequence[WorkerRequest]) -> None:
        echo(requests[:1])
        raise error

    backend = bench.load(execute)
    bench.send(wire.Execute(1, [request(1), request(2), request(3)]))
    responses = bench.next(wire.Executed).responses
    assert [(response.error_code, response.error_text) for response in responses] == [
        ("", ""),
        (code, text),
        (code, text),
    ]
    backend.on_execute = echo
    bench.send(wire.Execute(2, [request(4)]))
    assert [response.error_code for response in bench.next(wire.Executed).responses] == [""], "the worker goes on"
    bench.stop()


def test_a_request_that_the_model_forgot_gets_an_error(bench: Bench) -> None:
    bench.load(lambda requests: echo(requests[1:]))
    bench.send(wire.Execute(1, [request(1), request(2)]))
    responses = bench.next(wire.Executed).responses
    assert [response.error_text for response in responses] == ["the backend did not respond to the request", ""]
    bench.stop()


def test_a_request_whose_client_is_gone_is_not_executed(bench: Bench) -> None:
    executed: list[int] = []

    def execute(requests: Sequence[WorkerRequest]) -> None:
        executed.extend(each.ref.number for each in requests)
        echo(requests)

    bench.load(execute)
    bench.send(wire.Cancel([2]), wire.Execute(1, [request(1), request(2)]), wire.Execute(2, [request(3)]))
    assert [response.error_code for response in bench.next(wire.Executed).responses] == ["", "cancelled"]
    assert [response.error_code for response in bench.next(wire.Executed).responses] == [""]
    assert executed == [1, 3]
    bench.stop()


def test_a_model_may_respond_when_its_batch_has_ended(bench: Bench) -> None:
    kept: list[WorkerRequest] = []
    bench.load(kept.extend, kind=RespondingLater)
    bench.send(wire.Execute(1, [request(1)]))
    executed = bench.next(wire.Executed)
    assert (executed.batch, executed.responses) == (1, [])
    kept[0].respond([OutputValue("OUT", "FP32", np.ones(1, np.float32))], final=False)
    kept[0].finish()
    first, last = bench.next(wire.Responded), bench.next(wire.Responded)
    assert (first.request, first.final, last.request, last.final, last.response) == (1, False, 1, True, None)
    bench.stop()


class Idleness:
    """How often a worker was idle, and how often it gave memory back."""

    def __init__(self) -> None:
        self.given = 0
        self.times = threading.Semaphore(0)

    def wait(self) -> None:
        """Wait until the worker has been idle two times more: what it did before has been noticed then."""
        while self.times.acquire(blocking=False):
            pass
        for _ in range(2):
            self.times.acquire()


@pytest.fixture
def idleness(monkeypatch: pytest.MonkeyPatch) -> Idleness:
    """Workers are idle after a millisecond."""
    found, noticed = Idleness(), Worker._idle

    def give_back() -> None:
        found.given += 1

    def notice(worker: Worker) -> None:
        noticed(worker)
        found.times.release()

    monkeypatch.setattr("backends.worker.loop.IDLE_S", 0.001)
    monkeypatch.setattr("backends.worker.loop.give_memory_back", give_back)
    monkeypatch.setattr(Worker, "_idle", notice)
    return found


def test_an_idle_worker_gives_memory_back_once_after_its_last_batch(idleness: Idleness, bench: Bench) -> None:
    bench.load()
    idleness.wait()
    given = idleness.given
    idleness.wait()
    assert idleness.given == given
    bench.send(wire.Execute(1, [request(1)]))
    bench.next(wire.Executed)
    idleness.wait()
    assert idleness.given == given + 1
    idleness.wait()
    assert idleness.given == given + 1
    bench.stop()

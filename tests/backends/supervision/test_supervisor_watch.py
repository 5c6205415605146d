"""What a supervisor does with a worker that stands still, and with requests that it does not finish."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from backends.helper.process import Helper
from backends.launch.launcher import Pending, not_shown
from backends.supervision.instance_watch import MESSAGE_LIMIT_NS, TERM_GRACE_NS, ExecutionLimits
from backends.supervision.supervisor import InstanceSupervisor
from backends.supervision.watchdog import Watchdog
from backends.transport import wire
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import ServerStopping
from kernel.loop.busy_poll import BusyPolling, LoopPoller
from kernel.repository.placement import InstancePlan
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.testing import FakeClock, RecordingSink, model_spec
from schedulers.direct import direct
from shm.tensor import Tensor
from tests.backends.supervision.played_worker import FakeWorker, response, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import pytest

S = 1_000_000_000


class LoadingWorker(FakeWorker):
    """Loads its model at once, and then sends what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.channel.send(wire.Hello(wire.PROTOCOL, 1))
        asyncio.get_running_loop().add_reader(self._theirs.fileno(), self._read)

    def _read(self) -> None:
        for raw in self.channel.receive(wait=False) or ():
            if isinstance(wire.to_worker_decoder.decode(raw), wire.Load):
                self.channel.send(wire.Loaded(5))

    def die(self, cause: str) -> None:
        if self._theirs.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._theirs.fileno())
        super().die(cause)


NEEDS = WorkerNeeds("python")


class Workers:
    """A launcher."""

    def __init__(self) -> None:
        self.made: list[LoadingWorker] = []
        #: The needs of each.
        self.needs: list[WorkerNeeds] = []

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> LoadingWorker:
        self.made.append(LoadingWorker())
        self.needs.append(needs)
        return self.made[-1]

    @property
    def last(self) -> LoadingWorker:
        return self.made[-1]


class Lab:
    """A supervisor with a model in service. The test says when the watchdog looks, and what its time is."""

    def __init__(
        self, *, own_timeout_s: float | None = None, changeable: bool = True, decoupled: bool = False, **limits: int
    ) -> None:
        self.workers = Workers()
        self.supervisor = InstanceSupervisor(
            self.workers,
            LoopPoller(BusyPolling(0, 1)),
            Helper(self.workers, 1 << 20),
            arena_byte_size=1 << 20,
            verbose=0,
            watchdog=Watchdog(),
            limits=ExecutionLimits(
                limits.get("report_ns", 0),
                limits.get("timeout_ns", 0),
                "--execution-timeout",
                changeable,
                limits.get("response_wait_ns", 0),
            ),
        )
        timeout_ns = None if own_timeout_s is None else int(own_timeout_s * S)
        spec = msgspec.structs.replace(model_spec("m"), execution_timeout_ns=timeout_ns, decoupled=decoupled)
        self.model = Model(spec, ModelConfig(), 1, direct, FakeClock())

    async def start(self) -> None:
        self.model.start()
        await self.supervisor.start("m", NEEDS)
        await self.supervisor.load(InstancePlan("m_0", "/m", 1, needs=NEEDS), "{}")
        self.supervisor.join(self.model)
        self.supervisor.serve()

    def submit(self) -> Request:
        request = Request("m", [Tensor("IN", "FP32", [1], bytes(4))], RecordingSink())
        self.model.submit(request)
        return request

    def look(self, *seconds: float) -> None:
        for now_s in seconds:
            self.supervisor.look(int(now_s * S))


def run(scenario: Callable[[Lab], Coroutine[None, None, None]], lab: Lab) -> None:
    async def main() -> None:
        await lab.start()
        await scenario(lab)
        lab.model.close(ServerStopping(""))
        await lab.supervisor.stop(at_once=True)
        lab.model.check()

    asyncio.run(main())


def errors(request: Request) -> list[str]:
    assert isinstance(request.sink, RecordingSink)
    return [error.message for error in request.sink.errors]


# ---- executions that take too long ----------------------------------------------------------


def test_an_execution_that_takes_too_long_ends_its_worker_and_says_so_once() -> None:
    async def scenario(lab: Lab) -> None:
        running, waiting = lab.submit(), lab.submit()
        await settle()
        lab.look(1, 3.4)
        assert not lab.workers.last.terminated
        lab.look(3.5)
        assert lab.workers.last.terminated
        assert lab.model.instances.count == 0, "it gets no more batches"
        assert errors(running) == [], "it may still respond"
        lab.look(3.5 + TERM_GRACE_NS / S)
        [error] = errors(running)
        assert error == (
            "model 'm' was still executing the request after 2.5 s; its limit is 2.5 s (--execution-timeout). Its "
            "worker was ended, and the request was not retried"
        )
        assert errors(waiting) == []
        assert lab.model.statistics.execution_timeouts == 1
        await settle()
        assert len(lab.workers.made) == 2, "another worker takes its place"
        assert lab.workers.needs == [NEEDS, NEEDS]
        lab.look(9)
        assert (lab.model.instances.count, lab.model.trouble) == (1, "")
        assert not lab.workers.last.terminated
        lab.workers.last.channel.send(wire.Executed(1, [response()]))
        await settle()
        assert waiting.finished
        assert errors(waiting) == []

    run(scenario, Lab(timeout_ns=int(2.5 * S)))


def test_the_models_own_limit_takes_precedence() -> None:
    async def scenario(lab: Lab) -> None:
        running = lab.submit()
        lab.look(1, 5)
        lab.workers.last.die("killed by signal 15 (SIGTERM)")
        assert "its limit is 4 s (parameter naiad.execution_timeout of the model)" in errors(running)[0]

    run(scenario, Lab(own_timeout_s=4, timeout_ns=60 * S))


def test_a_model_can_be_without_a_limit() -> None:
    async def scenario(lab: Lab) -> None:
        lab.submit()
        lab.look(1, 1000)
        assert not lab.workers.last.terminated

    run(scenario, Lab(own_timeout_s=0, timeout_ns=S))


def test_a_model_has_no_limit_of_its_own_while_its_author_may_stop_it() -> None:
    async def scenario(lab: Lab) -> None:
        lab.submit()
        await settle()
        lab.look(0, 3600)
        assert lab.model.statistics.execution_timeouts == 0
        await lab.supervisor.stop(at_once=True)

    run(scenario, Lab(own_timeout_s=1, changeable=False))


def test_a_response_within_the_grace_counts() -> None:
    async def scenario(lab: Lab) -> None:
        running = lab.submit()
        lab.look(1, 3)
        lab.workers.last.channel.send(wire.Executed(1, [response()]))
        await settle()
        lab.workers.last.die("exit code 0")
        assert (running.finished, errors(running)) == (True, [])

    run(scenario, Lab(timeout_ns=2 * S))


def test_a_long_execution_is_reported_in_log_index_and_metrics_while_the_model_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(lab: Lab) -> None:
        lab.submit()
        lab.look(1, 60)
        assert lab.model.trouble == ""
        lab.look(62)
        assert lab.model.trouble == "instance 'm_0' busy for 61 s"
        lab.look(74)
        assert lab.model.trouble == "instance 'm_0' busy for 73 s"
        assert lab.model.ready
        lab.look(122)
        remedy = "--execution-timeout, or the model's parameter naiad.execution_timeout, ends such executions"
        assert [record.getMessage() for record in caplog.records if "busy" in record.getMessage()] == [
            f"model instance 'm_0' busy for 61 s with one execution; the next lines say where. {remedy}",
            f"model instance 'm_0' busy for 121 s with one execution; the next lines say where. {remedy}",
        ]
        assert lab.workers.last.stacks_written == 2
        lab.workers.last.channel.send(wire.Executed(1, [response()]))
        await settle()
        lab.look(123)
        assert lab.model.trouble == ""

    run(scenario, Lab(report_ns=60 * S))


# ---- processes that are stopped -------------------------------------------------------------


def test_a_stopped_process_gets_no_batches_until_it_goes_on() -> None:
    async def scenario(lab: Lab) -> None:
        lab.look(1)
        lab.workers.last.is_stopped = True
        lab.look(2, 3)
        assert not lab.model.ready
        assert lab.model.trouble == "instance 'm_0' stopped by a signal (SIGSTOP)"
        waiting = lab.submit()
        assert lab.model.live.queued == 1
        lab.workers.last.is_stopped = False
        lab.look(4)
        assert (lab.model.ready, lab.model.trouble, lab.model.live.queued) == (True, "", 0)
        lab.workers.last.channel.send(wire.Executed(1, [response()]))
        await settle()
        assert waiting.finished

    run(scenario, Lab())


def test_a_retired_instance_that_was_stopped_and_goes_on_gets_no_batches() -> None:
    async def scenario(lab: Lab) -> None:
        lab.submit()
        lab.workers.last.is_stopped = True
        lab.look(1)
        leaving = asyncio.ensure_future(lab.supervisor.retire(60))
        await settle()
        lab.workers.last.is_stopped = False
        lab.look(2)
        assert lab.model.instances.count == 0
        lab.workers.last.channel.send(wire.Executed(1, [response()]))
        await leaving

    run(scenario, Lab())


def test_a_stopped_process_is_killed_at_the_limit_of_its_execution() -> None:
    async def scenario(lab: Lab) -> None:
        running = lab.submit()
        lab.workers.last.is_stopped = True
        lab.look(1, 4, 6)
        assert "still executing the request after 3.0 s" in errors(running)[0]
        await settle()
        assert lab.model.ready
        assert lab.model.trouble == ""

    run(scenario, Lab(timeout_ns=2 * S))


# ---- messages that do not end ---------------------------------------------------------------


def test_a_worker_that_sends_a_part_of_a_message_and_nothing_more_is_replaced() -> None:
    async def scenario(lab: Lab) -> None:
        running = lab.submit()
        await settle()
        lab.workers.last.raw(b"GET ")  # as a length 0x20544547, which is too much
        await settle()
        assert "it sent an invalid message" in errors(running)[0]
        running = lab.submit()
        await settle()
        lab.workers.last.raw(b"\0\0\1\0 garbage")
        await settle()
        lab.look(1, 1 + MESSAGE_LIMIT_NS / S)
        assert "it did not send the rest of a message within 30 s" in errors(running)[0]
        await settle()
        assert len(lab.workers.made) >= 2

    run(scenario, Lab())


def test_a_worker_that_is_still_loading_is_ended_for_that_too() -> None:
    async def main() -> None:
        lab = Lab()
        await lab.supervisor.start("m")
        loading = asyncio.ensure_future(lab.supervisor.complete("{}", "/m", 1, {}))
        await settle()
        lab.workers.last.raw(b"\x10\0\0\0 part")
        await settle()
        lab.look(1, 1 + MESSAGE_LIMIT_NS / S)
        [result] = await asyncio.gather(loading, return_exceptions=True)
        assert "did not send the rest of a message" in str(result)
        await lab.supervisor.stop(at_once=True)

    asyncio.run(main())


# ---- instances that leave -------------------------------------------------------------------


def test_an_instance_that_leaves_and_does_not_finish_in_time_is_killed() -> None:
    async def scenario(lab: Lab) -> None:
        running, waiting = lab.submit(), lab.submit()
        await settle()
        await lab.supervisor.retire(0.01)
        assert errors(running) == [
            "model instance 'm_0' was unloaded or replaced, and the request was not finished within 0.01 s "
            "(--model-unload-timeout-secs)"
        ]
        assert errors(waiting) == [], "the other instances execute it"
        assert lab.model.live.queued == 1
        await settle()
        assert len(lab.workers.made) == 1

    run(scenario, Lab())


# ---- responses that nobody reads ------------------------------------------------------------


async def fill(lab: Lab) -> None:
    """Let the worker send as many responses of its first request as it may."""
    for _ in range(wire.CREDIT_WINDOW):
        lab.workers.last.channel.send(wire.Responded(1, False, response()))
    await settle()


def test_a_request_whose_responses_nobody_reads_is_cancelled_and_its_instance_serves_others() -> None:
    async def scenario(lab: Lab) -> None:
        unread, other = lab.submit(), lab.submit()
        await fill(lab)
        lab.look(1, 10.9)
        assert (unread.finished, unread.cancelled) == (False, False)
        lab.look(11)
        assert unread.cancelled, "the request was not cancelled in the worker"
        assert errors(unread) == [
            "responses of model 'm' were not read for 10 s (--response-wait-timeout): the request was cancelled"
        ]
        lab.workers.last.channel.send(wire.Responded(1, True))
        lab.workers.last.channel.send(wire.Executed(1, []))
        lab.workers.last.channel.send(wire.Responded(2, True, response()))
        lab.workers.last.channel.send(wire.Executed(2, []))
        await settle()
        assert (other.finished, errors(other)) == (True, [])
        assert isinstance(unread.sink, RecordingSink)
        assert sum(each.final for each in unread.sink.responses) == 1
        lab.model.check()

    run(scenario, Lab(decoupled=True, response_wait_ns=10 * S))


def test_a_client_that_reads_now_and_then_is_waited_for() -> None:
    async def scenario(lab: Lab) -> None:
        request = lab.submit()
        await fill(lab)
        for second in range(1, 60, 9):
            lab.look(second)
            request.consumed()
        assert (request.finished, request.cancelled) == (False, False)

    run(scenario, Lab(decoupled=True, response_wait_ns=10 * S))


def test_without_a_limit_a_response_waits_for_any_time() -> None:
    async def scenario(lab: Lab) -> None:
        request = lab.submit()
        await fill(lab)
        lab.look(1, 100_000)
        assert (request.finished, request.cancelled) == (False, False)

    run(scenario, Lab(decoupled=True))

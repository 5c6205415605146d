"""What a model counts while requests go through it: the hooks of model and instances."""

from __future__ import annotations

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.observe.metrics_config import MetricsConfig
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import FakeClock, FakeInstance, RecordingSink, model_spec
from schedulers.direct import direct
from tests.kernel.observe.times import times_until

FAST = times_until(1_000, infer_ns=1_000)


class Bench:
    """A model with one fake instance."""

    def __init__(self, *, decoupled: bool = False) -> None:
        self.clock = FakeClock()
        self.model = Model(model_spec("m", decoupled=decoupled), ModelConfig(), 1, direct, self.clock)
        self.statistics = self.model.statistics
        self.model.start()
        self.instance = FakeInstance("m_0")
        self.model.instances.add(self.instance)

    def submit(self) -> Request:
        request = Request("m", [], RecordingSink(), streaming=True)
        request.received_ns = self.clock.now_ns()
        self.model.submit(request)
        return request

    def execute(self) -> None:
        """Let the instance answer its first batch."""
        for request in self.instance.batches[0].requests:
            request.respond(Response("m", "1", "", outputs=[]))
        self.end_execution()

    def end_execution(self) -> None:
        batch = self.instance.record.executed(self.instance.batches.popleft().number)
        self.model.instances.executed(self.instance, batch, FAST)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_requests_that_wait_at_an_instance_are_not_queued_but_wait(bench: Bench) -> None:
    for _ in range(30):  # short executions, so that work is given ahead of time
        bench.submit()
        bench.execute()
    for _ in range(40):
        bench.submit()
    given = len(bench.instance.batches)
    assert 1 < given < 40
    assert bench.model.instances.waiting == given - 1
    assert bench.model.live.queued == 40 - given
    assert bench.model.in_flight == 40


def test_a_worker_that_comes_back_is_a_restart_and_the_first_one_is_none(bench: Bench) -> None:
    assert (bench.statistics.workers_lost, bench.statistics.workers_restarted) == (0, 0)
    bench.model.instances.lost(bench.instance, [])
    assert (bench.statistics.workers_lost, bench.statistics.workers_restarted) == (1, 0)
    bench.model.instances.add(FakeInstance("m_0"))
    assert (bench.statistics.workers_lost, bench.statistics.workers_restarted) == (1, 1)
    bench.model.instances.add(FakeInstance("m_1"))
    assert bench.statistics.workers_restarted == 1


def test_a_stream_lasts_until_its_final_response() -> None:
    bench = Bench(decoupled=True)
    bench.statistics.measure(MetricsConfig(histogram_latencies=True), ModelConfig())
    request = bench.submit()
    bench.end_execution()  # the model responds later
    assert sum(bench.statistics.durations.counts) == 0
    bench.clock.advance(20_000_000)
    request.respond(Response("m", "1", "", outputs=[], final=False))
    bench.clock.advance(50_000_000)
    request.respond(Response("m", "1", ""))
    assert bench.statistics.first_responses is not None
    assert bench.statistics.first_responses.sum == 20
    assert bench.statistics.durations.sum == 70_000_000
    assert bench.statistics.success.count == 1


def test_one_answer_is_observed_once(bench: Bench) -> None:
    bench.submit()
    bench.clock.advance(5_000)
    bench.execute()
    assert (bench.statistics.durations.sum, sum(bench.statistics.durations.counts)) == (5_000, 1)

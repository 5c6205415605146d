"""The counters of a model while it executes requests."""

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


class CountedModel:
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
        """Let the instance respond to its first batch."""
        for request in self.instance.batches[0].requests:
            request.respond(Response("m", "1", "", outputs=[]))
        self.end_execution()

    def end_execution(self) -> None:
        batch = self.instance.record.executed(self.instance.batches.popleft().number)
        self.model.instances.executed(self.instance, batch, FAST)


@pytest.fixture
def counted() -> CountedModel:
    return CountedModel()


def test_requests_dispatched_ahead_of_time_are_waiting_and_not_queued(counted: CountedModel) -> None:
    for _ in range(30):  # after short executions, batches are dispatched ahead of time
        counted.submit()
        counted.execute()
    for _ in range(40):
        counted.submit()
    dispatched = len(counted.instance.batches)
    assert 1 < dispatched < 40
    assert counted.model.instances.waiting == dispatched - 1
    assert counted.model.live.queued == 40 - dispatched
    assert counted.model.in_flight == 40


def test_only_the_replacement_of_a_lost_worker_counts_as_restart(counted: CountedModel) -> None:
    assert (counted.statistics.workers_lost, counted.statistics.workers_restarted) == (0, 0)
    counted.model.instances.lost(counted.instance, [])
    assert (counted.statistics.workers_lost, counted.statistics.workers_restarted) == (1, 0)
    counted.model.instances.add(FakeInstance("m_0"))
    assert (counted.statistics.workers_lost, counted.statistics.workers_restarted) == (1, 1)
    counted.model.instances.add(FakeInstance("m_1"))
    assert counted.statistics.workers_restarted == 1


def test_the_duration_of_a_stream_ends_with_its_final_response() -> None:
    counted = CountedModel(decoupled=True)
    counted.statistics.configure(MetricsConfig(histogram_latencies=True), ModelConfig())
    request = counted.submit()
    counted.end_execution()  # the model responds later
    assert sum(counted.statistics.durations.counts) == 0
    counted.clock.advance(20_000_000)
    request.respond(Response("m", "1", "", outputs=[], final=False))
    counted.clock.advance(50_000_000)
    request.respond(Response("m", "1", ""))
    assert counted.statistics.first_responses is not None
    assert counted.statistics.first_responses.sum == 20
    assert counted.statistics.durations.sum == 70_000_000
    assert counted.statistics.success.count == 1


def test_a_single_response_is_observed_once(counted: CountedModel) -> None:
    counted.submit()
    counted.clock.advance(5_000)
    counted.execute()
    assert (counted.statistics.durations.sum, sum(counted.statistics.durations.counts)) == (5_000, 1)

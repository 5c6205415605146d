"""A delay that may end early against a fixed one: in no pattern of arrivals are fewer requests executed per second, or
batches much smaller for it."""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING

import pytest

from kernel.config.spec import DynamicBatching
from kernel.serving.request import Request
from kernel.testing import RecordingSink, model_spec
from schedulers.dynamic_batcher import DynamicBatcher
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

DELAY_US = 500
RUN_US = 2_000_000


class Arrivals:
    """A model with instances that take a given time, and the clients that ask it. Times are in microseconds."""

    def __init__(self, *, early: bool, execution_us: int, instances: int) -> None:
        settings = DynamicBatching(max_queue_delay_ns=DELAY_US * 1000, delay_may_end_early=early)
        spec = model_spec("m", max_batch_size=16)
        self.batcher = DynamicBatcher(spec, settings, execution_ns=lambda: execution_us * 1000)
        self.random = random.Random(1)
        self._execution_us = execution_us
        self._idle = instances
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now_us = 0.0
        self._again: dict[Request, Callable[[], None]] = {}
        self.batches: list[int] = []
        self.latencies_us: list[float] = []

    def after(self, us: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self._now_us + us, self._number, act))

    def request(self, then: Callable[[], None] = lambda: None) -> None:
        """Let a request arrive; `then` is called when it has its response."""
        request = Request("m", [Tensor("IN", "FP32", [1, 1], b"")], RecordingSink())
        request.batch_size, request.queue_start_ns = 1, int(self._now_us * 1000)
        self._again[request] = then
        assert self.batcher.add(request)
        self.after(5, self._take)  # the end of an event-loop iteration

    def client(self, think_us: Callable[[], float]) -> None:
        """Add a client that waits for each response, and then for a time."""
        self.after(self.random.uniform(0, 2000), lambda: self.request(lambda: self.client_thinks(think_us)))

    def client_thinks(self, think_us: Callable[[], float]) -> None:
        self.after(think_us(), lambda: self.request(lambda: self.client_thinks(think_us)))

    def pairs(self, every_us: float, share: float) -> None:
        """Let a request arrive regularly, and after some of them another within the delay."""
        self.request()
        if self.random.random() < share:
            self.after(self.random.uniform(50, 450), self.request)
        self.after(every_us, lambda: self.pairs(every_us, share))

    def run(self, until_us: float) -> None:
        while self._events and self._events[0][0] <= until_us:
            self._now_us, _, act = heapq.heappop(self._events)
            act()
        self.batcher.queue.check()

    def _take(self) -> None:
        while self._idle and (batch := self.batcher.take(int(self._now_us * 1000))):
            self._idle -= 1
            self.batches.append(len(batch))
            self.after(self._execution_us, lambda batch=batch: self._finish(batch))  # type: ignore[misc]
        until_ns = self.batcher.wait_until_ns()
        if self._idle and until_ns is not None:
            self.after(max(0.0, until_ns / 1000 - self._now_us) + 0.001, self._take)

    def _finish(self, batch: list[Request]) -> None:
        self._idle += 1
        for request in batch:
            self.latencies_us.append(self._now_us - request.queue_start_ns / 1000)
            self._again.pop(request)()
        self._take()


def two_speeds(arrivals: Arrivals) -> None:
    for _ in range(4):
        arrivals.client(lambda: arrivals.random.uniform(20, 50))
        arrivals.client(lambda: arrivals.random.uniform(400, 3000))


def some_pause(arrivals: Arrivals) -> None:
    for _ in range(8):
        arrivals.client(lambda: arrivals.random.choice([20, 30, 40, 3000]))


def out_of_phase(arrivals: Arrivals) -> None:
    for _ in range(8):
        arrivals.client(lambda: 20)


@pytest.mark.parametrize("clients", [two_speeds, some_pause, out_of_phase])
@pytest.mark.parametrize("execution_us", [100, 1000, 5000])
@pytest.mark.parametrize("instances", [1, 2])
def test_clients_that_wait_for_responses_get_no_fewer(
    clients: Callable[[Arrivals], None], execution_us: int, instances: int
) -> None:
    fixed, early = (Arrivals(early=early, execution_us=execution_us, instances=instances) for early in (False, True))
    for arrivals in (fixed, early):
        clients(arrivals)
        arrivals.run(RUN_US)
    assert len(early.latencies_us) >= 0.97 * len(fixed.latencies_us)
    assert mean(early.batches) >= 0.93 * mean(fixed.batches)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("execution_us", [200, 5000, 20_000])
def test_pairs_that_come_now_and_then_stay_together(share: float, execution_us: int) -> None:
    fixed, early = (Arrivals(early=early, execution_us=execution_us, instances=1) for early in (False, True))
    for arrivals in (fixed, early):
        every_us = 10.0 * execution_us
        arrivals.pairs(every_us, share)
        arrivals.run(3000 * every_us)
    assert mean(early.batches) >= 0.94 * mean(fixed.batches)
    assert mean(early.latencies_us) <= 1.02 * mean(fixed.latencies_us)
    if execution_us >= 10 * DELAY_US:  # a request that comes too late waits for an execution
        assert percentile_98(early.latencies_us) <= 1.1 * percentile_98(fixed.latencies_us)


def mean(values: list[int] | list[float]) -> float:
    return sum(values) / len(values)


def percentile_98(values: list[float]) -> float:
    return sorted(values)[len(values) * 98 // 100]

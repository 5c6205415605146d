"""Takes the samples of `History` on the event loop, from the start of the front door to its end."""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.serving.interface import KernelInterface
    from kernel.serving.model_figures import ModelCounters
    from protocols.http.dashboard.history import History

#: Seconds between two samples, at least and at most. Between these, samples take `_MOST_SHARE` of a processor.
INTERVAL_S = 2.0
_MOST_INTERVAL_S = 15.0
_MOST_SHARE = 0.002

#: How many models are read without serving others: about a millisecond.
PORTION = 50


class HistorySampler:
    """Samples one server. The modules that it needs are imported with the first sample: a start does not wait."""

    def __init__(self, kernel: KernelInterface, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._kernel = kernel
        self._now_ns = now_ns
        self._timer: asyncio.Handle | None = None
        self._models: Iterator[ModelCounters] = iter(())
        self._spent_s = 0.0
        #: None until the first sample.
        self.history: History | None = None

    def start(self) -> None:
        """Take samples from now on. `stop` follows."""
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.sample)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sample(self) -> None:
        """Begin a sample, whose portions follow."""
        if self.history is None:
            from protocols.http.dashboard.history import History

            self.history = History()
        self._spent_s = 0.0
        self._models = iter(self._kernel.counters())
        self.history.begin(self._now_ns())
        self._portion(self.history)

    def _portion(self, history: History) -> None:
        begin_s = time.perf_counter()
        portion = list(islice(self._models, PORTION))
        for model in portion:
            history.add(model)
        if len(portion) == PORTION:
            self._spent_s += time.perf_counter() - begin_s
            self._timer = asyncio.get_running_loop().call_soon(self._portion, history)
            return
        self._end(history)
        self._spent_s += time.perf_counter() - begin_s
        interval_s = min(max(INTERVAL_S, self._spent_s / _MOST_SHARE), _MOST_INTERVAL_S)
        self._timer = asyncio.get_running_loop().call_later(interval_s, self.sample)

    def _end(self, history: History) -> None:
        from protocols.http.dashboard.history import ServerSample  # as in `sample`

        kernel = self._kernel
        history.end(ServerSample(kernel.queued, kernel.budget.used_byte_size, time.process_time()))

"""Which requests are traced: every n-th, up to a number. Pure.

The server's settings and those of each model with settings of its own have a sampler each (Triton's `TraceSetting`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.settings import TraceValues


class Sampler:
    """Counts the requests that have the same settings."""

    __slots__ = ("_until", "opentelemetry", "remaining", "tensors", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values = values
        self.opentelemetry = values.trace_mode == "opentelemetry"
        self.tensors = "TENSORS" in values.trace_level and not self.opentelemetry
        #: How many more requests may be traced; -1 for no limit.
        self.remaining = values.trace_count
        self._until = values.trace_rate

    def hit(self) -> bool:
        """Count a request, and return whether it is traced: the first one is the `trace_rate`-th."""
        self._until -= 1
        if self._until:  # also for ever, if the rate is 0
            return False
        self._until = self.values.trace_rate
        if self.remaining == 0:
            return False
        if self.remaining > 0:
            self.remaining -= 1
        return True

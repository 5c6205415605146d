"""Which requests are traced: every n-th, up to a number. Pure.

The server's settings and those of each model with settings of its own have a sampler each (Triton's `TraceSetting`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.settings import TraceValues


#: How many requests before one that is traced front doors begin to take times: as many may be on their way.
NEAR = 64


class Sampler:
    """Counts the requests that have the same settings."""

    __slots__ = ("opentelemetry", "remaining", "tensors", "until", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values = values
        self.opentelemetry = values.trace_mode == "opentelemetry"
        self.tensors = "TENSORS" in values.trace_level and not self.opentelemetry
        #: How many more requests may be traced; -1 for no limit.
        self.remaining = values.trace_count
        #: How many requests it takes until one is traced; for ever if the rate is 0.
        self.until = values.trace_rate

    def hit(self) -> bool:
        """Count a request, and return whether it is traced: the first one is the `trace_rate`-th."""
        self.until -= 1
        return not self.until and self.begin_next()

    def begin_next(self) -> bool:
        """Begin to count again: `until` is 0. Returns whether the present request is traced."""
        self.until = self.values.trace_rate
        if self.remaining == 0:
            return False
        if self.remaining > 0:
            self.remaining -= 1
        return True

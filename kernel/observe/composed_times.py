"""The compute times of a request to an ensemble: the sums of those of its steps (Triton's secondary statistics). Pure.

A step's times are known when its execution has ended, which can be after the ensemble's final response. So sums are
collected first, and added to the ensemble's statistics when its request has succeeded, as are later times.
"""

from __future__ import annotations

from typing import Protocol


class TimeSums(Protocol):
    """Counters that hold sums of durations by stage, in nanoseconds."""

    input_ns: int
    infer_ns: int
    output_ns: int


class ComposedTimes:
    """The sums of one request, in nanoseconds."""

    __slots__ = ("_counted_in", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0
        self._counted_in: tuple[TimeSums, ...] = ()

    def add(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Add the times of one execution of a step."""
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns
        for sums in self._counted_in:
            sums.input_ns += input_ns
            sums.infer_ns += infer_ns
            sums.output_ns += output_ns

    def count_in(self, *statistics: TimeSums) -> None:
        """Add what was collected to `statistics`, and from now on also what comes later."""
        self._counted_in = statistics
        for sums in statistics:
            sums.input_ns += self.input_ns
            sums.infer_ns += self.infer_ns
            sums.output_ns += self.output_ns


class ComposedRequest(Protocol):
    """A request to an ensemble, or one for which another request is made."""

    @property
    def composed(self) -> ComposedTimes | None: ...

    @property
    def parent(self) -> ComposedRequest | None: ...


def add_to_ensembles(parent: ComposedRequest | None, input_ns: int, infer_ns: int, output_ns: int) -> None:
    """Add the times of a step to the ensemble `parent`, and to the ensembles of which that one is a step.

    A model that calls others has its own times, which contain those of the calls.
    """
    while parent is not None and parent.composed is not None:
        parent.composed.add(input_ns, infer_ns, output_ns)
        parent = parent.parent

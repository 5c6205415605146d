"""When a busy instance gets its next batch: shortly before it ends the last one. No clock, no I/O.

Earlier, and the batch would be smaller than it could be; later, and the instance would wait for it. Two times are
learned: how long an execution takes, by its rows, and how long before its end the next batch has to be dispatched, so
that it is formed, sent, read and gathered in time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.observe.execution_reports import ExecutionTimes

#: How long before the expected end the next batch is dispatched, in nanoseconds: at first, and the bounds.
_FIRST_LEAD_NS = 300_000
_LEAST_LEAD_NS = 100_000
_MOST_LEAD_NS = 2_000_000

#: The lead grows by the first after a batch for which the instance has waited, and shrinks by the second after any
#: other: so the instance waits for one batch in nine.
_LATER_NS = 32_000
_SOONER_NS = 4_000

#: A wait of the instance that is not longer than this counts as none: its threads wait for a processor now and then.
_NO_WAIT_NS = 100_000

#: Of a number of rows, this many leading bits count: executions of similar sizes take similar times.
_BITS = 4

#: One part in this many is the weight of the last execution in the moving averages.
_WEIGHT = 8


class NextBatchTime:
    """Decides it for a model with one instance. Times are monotonic nanoseconds of the kernel."""

    def __init__(self) -> None:
        #: By rows: the moving averages of the time of an execution, and of its distance from the average.
        self._by_rows: dict[int, tuple[int, int]] = {}
        self._lead_ns = _FIRST_LEAD_NS
        #: The execution before, if the next batch was dispatched before its end.
        self._before: ExecutionTimes | None = None

    def executed(
        self, rows: int, times: ExecutionTimes, *, followed: bool, queued: bool, overlaps: bool = False
    ) -> None:
        """An execution of `rows` rows has ended. `followed`: the instance has its next batch; `queued`: requests wait
        for it; `overlaps`: it copies inputs while it computes, see `BatchRecord`."""
        self._note(_rounded(rows), times.output_start_ns - times.input_end_ns)
        before, self._before = self._before, times if followed else None
        if before is not None:
            waited_ns = times.input_end_ns - before.output_start_ns if overlaps else _waited_ns(before, times)
            self._adjust(late=waited_ns > _NO_WAIT_NS)
        if queued and not followed:
            self._adjust(late=True)

    def _note(self, key: int, took_ns: int) -> None:
        found = self._by_rows.get(key)
        if found is None:
            self._by_rows[key] = (took_ns, took_ns // 4)
            return
        mean_ns, distance_ns = found
        difference_ns = took_ns - mean_ns
        self._by_rows[key] = (
            mean_ns + difference_ns // _WEIGHT,
            distance_ns + (abs(difference_ns) - distance_ns) // _WEIGHT,
        )

    def _adjust(self, *, late: bool) -> None:
        lead_ns = self._lead_ns + (_LATER_NS if late else -_SOONER_NS)
        self._lead_ns = min(max(lead_ns, _LEAST_LEAD_NS), _MOST_LEAD_NS)

    def dispatch_ns(self, begun_ns: int, rows: int) -> int | None:
        """Return when the batch after this one is to be dispatched, which has begun at `begun_ns` with `rows` rows.

        None if that cannot be said: the model has not executed as many rows yet, or its executions take very different
        times. Then the next batch is dispatched after the end of this one.
        """
        found = self._by_rows.get(_rounded(rows))
        if found is None:
            return None
        mean_ns, distance_ns = found
        if 2 * distance_ns >= mean_ns:
            return None
        # Not before half of it has passed: the clients of the batch before are to be in the next one.
        return begun_ns + max(mean_ns - self._lead_ns, mean_ns // 2)


def _waited_ns(before: ExecutionTimes, times: ExecutionTimes) -> int:
    """Return how long the instance has waited for the second of two batches, after the end of the first one.

    A batch that was gathered before counts as if it had been gathered just before its computation: then it begins
    before the end of the first one, unless gathering takes less time than the change from one to the other.
    """
    if times.input_end_ns <= before.compute_end_ns:  # it was computed while the worker responded to the one before
        return times.compute_start_ns - before.output_start_ns
    return times.compute_start_ns - before.compute_end_ns


def _rounded(rows: int) -> int:
    shift = max(0, rows.bit_length() - _BITS)
    return rows >> shift << shift

"""Which configurations `naiad tune` tries: one setting after the other, from the best one so far. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: A configuration with more instances, or a longer delay, must have this many times the rate to be worth it.
WORTH = 1.03

#: The search along a setting ends after this many values in a row that are not better.
_FRUITLESS = 2

_PASSES = 2


class TuneCandidate(msgspec.Struct, frozen=True):
    """What is changed in the configuration of a model."""

    #: Of each instance group.
    instances: int
    #: 0: the model takes no batches.
    max_batch_size: int
    #: Of dynamic batching, in microseconds; None without dynamic batching.
    delay_us: int | None

    def text(self) -> str:
        """Return it in words."""
        parts = [f"{self.instances} instance{'s' * (self.instances > 1)}"]
        if self.delay_us is not None:
            parts.append(f"batches of up to {self.max_batch_size}, queue delay {self.delay_us} us")
        elif self.max_batch_size:
            parts.append("no dynamic batching")
        return ", ".join(parts)


def find_best(
    start: TuneCandidate,
    values: Mapping[str, Sequence[object]],
    measure: Callable[[TuneCandidate], float | None],
) -> TuneCandidate:
    """Return the best configuration.

    `values` has the values to try for fields of `TuneCandidate`, in this order. `measure` returns the rate of a
    configuration within the latency goal, 0 if it misses the goal, and None if it cannot be served. It is called once
    for each configuration.
    """
    rates: dict[TuneCandidate, float | None] = {}

    def rate(candidate: TuneCandidate) -> float:
        if candidate not in rates:
            rates[candidate] = measure(candidate)
        return rates[candidate] or 0.0

    best = start
    rate(start)
    for _ in range(_PASSES):
        before = best
        for field, choices in values.items():
            fruitless = 0
            for value in choices:
                candidate = msgspec.structs.replace(best, **{field: value})
                if candidate in rates:
                    continue
                if candidate.max_batch_size and field == "max_batch_size" and candidate.delay_us is None:
                    candidate = msgspec.structs.replace(candidate, delay_us=0)
                    if candidate in rates:
                        continue
                if rate(candidate) > WORTH * rate(best):
                    best, fruitless = candidate, 0
                else:
                    fruitless += 1
                if fruitless == _FRUITLESS:
                    break
        if best == before:
            break
    return best

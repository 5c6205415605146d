"""Whether a row is within its limits, as ratios to them. Pure."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

import msgspec

from bench.heavy.attack import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.heavy.attack import HeavyRow
    from bench.heavy.measurement import RowSample

#: The healthy client's limits, and how many times its body, or that of its response, a request may make the main
#: process grow.
P99_LIMIT_MS, LONGEST_LIMIT_MS, GROWTH_FACTOR = 20.0, 250.0, 3
#: The p99 while several heavy requests arrive at once, each of which may take turns of the event loop and a helper's
#: share of the processors.
SEVERAL_P99_LIMIT_MS = 50.0
#: A smaller body counts as this many bytes: a process also grows by what connections and responses take.
LEAST_BODY_BYTE_SIZE = 4 * MIB
#: Pages that the main process keeps for the next request, beside its budget (`shm/blocks.py`).
KEPT_BYTE_SIZE = 2 * 128 * MIB  # in the arena of the model's inputs, and in that of messages for helpers


class RowVerdict(msgspec.Struct, frozen=True):
    """A row's figures relative to its limits; above 1 is too much.

    Waits are medians of the rounds. The growth is that of the round with the most, since a process that has grown once
    grows less the next time.
    """

    p99: float
    longest: float
    growth: float
    #: What is wrong, in words; empty if nothing is.
    wrong: list[str]


def p99_limit_ms(sample: RowSample) -> float:
    """Return the limit of the healthy client's p99."""
    return P99_LIMIT_MS if sample.at_once == 1 else SEVERAL_P99_LIMIT_MS


def growth_limit(row: HeavyRow, budget_byte_size: int, sample: RowSample) -> int:
    """Return by how many bytes the main process may grow, which has `budget_byte_size` for tensors and messages."""
    if row.exceeds_budget:
        return budget_byte_size + KEPT_BYTE_SIZE + GROWTH_FACTOR * LEAST_BODY_BYTE_SIZE
    return GROWTH_FACTOR * max(sample.body_byte_size, sample.response_byte_size, LEAST_BODY_BYTE_SIZE)


def judge(row: HeavyRow, budget_byte_size: int, samples: Sequence[RowSample]) -> RowVerdict:
    """Compare the rounds of a row, at least one, with its limits."""
    p99 = statistics.median(each.p99_ms / p99_limit_ms(each) for each in samples)
    longest = statistics.median(each.longest_ms for each in samples) / LONGEST_LIMIT_MS
    growth = max(each.growth.total / growth_limit(row, budget_byte_size, each) for each in samples)
    ratios = {"p99": p99, "longest wait": longest, "growth": growth}
    wrong = [f"{name} is {ratio:.1f} times its limit" for name, ratio in ratios.items() if ratio > 1]
    for each in samples:
        if not row.accepts(each.status):
            wrong.append(f"status {each.status or 'none'}, expected {row.status}")
        if not re.search(row.text, "\n".join(each.texts)):
            wrong.append(f"{row.text!r} is not in the response")
        wrong += [f"a healthy request failed: {text}" for text in each.failures]
    return RowVerdict(p99, longest, growth, [*dict.fromkeys(wrong)])

"""The ledger of a client: every request that it sent, and that each ended in exactly one way. Pure.

A request ends by its response, by an error that says why, or because the client left it. One that has no end is lost;
one with two ends was served twice.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


#: Numbers differ between texts that say the same.
_DIGITS = re.compile(r"\d+")


class Outcome(StrEnum):
    """How a request ended."""

    #: A response with the expected content.
    OK = "ok"
    #: An error with a status and a text.
    ERROR = "error"
    #: A response with content that another request asked for, or that is broken.
    WRONG = "wrong"
    #: The connection ended without a response.
    CUT = "cut"
    #: Nothing came within the time that the client waits.
    HUNG = "hung"
    #: The client cancelled it or left.
    LEFT = "left"


class Ledger:
    """What became of requests. `begin` and `end` are for one request each; texts of errors are counted."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._next = 0
        self._lost = 0
        self.sent = 0
        #: How many requests ended in each way, by the kind of request.
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()
        #: Requests that ended a second time.
        self.twice = 0
        #: Texts of errors and of what else was not as expected, with how often each came.
        self.texts: Counter[str] = Counter()

    def begin(self, kind: str) -> int:
        """Note that a request is sent. Returns its number."""
        self._next += 1
        self.sent += 1
        self._open[self._next] = kind
        return self._next

    def end(self, number: int, outcome: Outcome, text: str = "") -> None:
        """Note how a request ended."""
        kind = self._open.pop(number, None)
        if kind is None:
            self.twice += 1
            return
        self.outcomes[kind, outcome] += 1
        if text:
            self.texts[f"{kind}: {_DIGITS.sub('N', text[:200])}"] += 1

    def total(self, *outcomes: Outcome) -> int:
        """Return how many requests ended in one of these ways."""
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome in outcomes)

    @property
    def lost(self) -> int:
        """Requests without an end."""
        return len(self._open) + self._lost

    def add(self, others: Iterable[Ledger]) -> None:
        """Take the figures of further ledgers, whose clients have ended."""
        for other in others:
            self.sent += other.sent
            self.twice += other.twice
            self._lost += other.lost
            self.outcomes += other.outcomes
            self.texts += other.texts

    def wrong(self) -> list[str]:
        """Return what no run may have, in words; empty if everything is accounted for."""
        found: list[str] = []
        if self.lost:
            found.append(f"{self.lost} requests have no end")
        if self.twice:
            found.append(f"{self.twice} requests ended twice")
        for outcome in (Outcome.WRONG, Outcome.CUT, Outcome.HUNG):
            kinds = {kind: count for (kind, each), count in self.outcomes.items() if each is outcome}
            found += [f"{count} x {kind}: {outcome}" for kind, count in sorted(kinds.items())]
        if self.sent != self.lost + self.outcomes.total():
            found.append(f"{self.sent} requests were sent, {self.outcomes.total()} ended")
        return found

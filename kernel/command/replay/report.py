"""What a replay has found, as a text and as JSON. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.command.start_messages import table_text
from kernel.texts import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.command.replay.comparing import Comparison

_PERCENTILES = (50, 90, 99)

#: The most differences that are kept one by one, and the most kinds of them. All are counted.
MOST_LINES = 100_000
MOST_KINDS = 1000

#: What is masked in a text to find texts of the same kind: ids, bytes, and numbers
#: that are no part of a name.
_VALUES = re.compile(
    r"""\[request id: [^\]]*\]|b'(?:[^'\\]|\\.)*'…?|b"(?:[^"\\]|\\.)*"…?|(?<![\w'])-?\d[\w.+-]*|\b(?:nan|inf)\b"""
)


class ReplayedModel(msgspec.Struct):
    """What has become of the requests to one model. Latencies are in nanoseconds."""

    sent: int = 0
    differing: int = 0
    errors_differing: int = 0
    #: Requests that got no response.
    failed: int = 0
    outputs_compared: int = 0
    outputs_not_compared: int = 0
    #: Requests that have responses of which no output could be compared.
    not_compared: int = 0
    largest_distance: float = 0.0
    #: Of requests with a final response on both sides.
    recorded_ns: list[int] = []
    replayed_ns: list[int] = []


class DifferenceKind(msgspec.Struct):
    """Differences of one model whose texts differ in values alone."""

    model: str
    #: The text of the first one, and the id of its request.
    text: str
    id: str
    count: int = 0


class ReplayReport:
    """Collects what a replay finds."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._models: dict[str, ReplayedModel] = {}
        #: Why requests were not sent, or their responses not compared → how many.
        self.skipped: Counter[str] = Counter()
        #: Models that the target does not serve → how many requests to them were not sent.
        self.missing: dict[str, int] = {}
        #: Lines about single requests: the model, the id, and what differs. At most `MOST_LINES`.
        self.lines: list[tuple[str, str, str]] = []
        self.line_count = 0
        self._kinds: dict[tuple[str, str], DifferenceKind] = {}
        #: Why the replay has ended before all requests were sent; empty if it has not.
        self.stopped = ""
        self.notes: list[str] = []

    def add(self, model: str, id: str, comparison: Comparison, recorded_ns: int | None, replayed_ns: int) -> None:
        """A request was sent and has all its responses."""
        found = self._model(model)
        found.outputs_compared += comparison.compared
        found.outputs_not_compared += comparison.not_compared
        found.differing += bool(comparison.differences)
        found.not_compared += bool(comparison.not_compared and not comparison.compared)
        found.errors_differing += comparison.errors_differ
        found.largest_distance = max(found.largest_distance, comparison.largest_distance)
        if recorded_ns is not None:
            found.recorded_ns.append(recorded_ns)
            found.replayed_ns.append(replayed_ns)
        for text in comparison.differences:
            self._note(model, id, text)

    def fail(self, model: str, id: str, why: str) -> None:
        """A request was sent, or was to be sent, and has no response."""
        self._model(model).failed += 1
        self._note(model, id, why)

    def _note(self, model: str, id: str, text: str) -> None:
        self.line_count += 1
        if len(self.lines) < MOST_LINES:
            self.lines.append((model, id, text))
        key = (model, _VALUES.sub("#", text))
        if key not in self._kinds and len(self._kinds) >= MOST_KINDS:
            key = ("", "")
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = DifferenceKind(model, text, id)
        kind.count += 1

    def _model(self, name: str) -> ReplayedModel:
        found = self._models.setdefault(name, ReplayedModel())
        found.sent += 1
        return found

    @property
    def differs(self) -> bool:
        """Whether anything differs, has failed, or is missing at the target."""
        return bool(self.missing) or any(each.differing or each.failed for each in self._models.values())

    @property
    def nothing_compared(self) -> bool:
        """Whether no response was compared, so that nothing was found out."""
        return not any(each.sent > each.failed + each.not_compared for each in self._models.values())

    @property
    def exit_code(self) -> int:
        """1 if anything differs, 2 if nothing was found out, else 0; 130 if a person has stopped the replay."""
        if self.stopped:
            return 1 if self.differs else 130
        return 1 if self.differs else 2 * self.nothing_compared

    @property
    def kinds(self) -> list[DifferenceKind]:
        """The kinds of differences, the most frequent first."""
        return sorted(self._kinds.values(), key=lambda each: -each.count)

    @property
    def verdict(self) -> str:
        """The last line of the report."""
        if self.stopped and not self.differs:
            return "No response differed until then."
        if any(each.differing for each in self._models.values()):
            return "Responses differ."
        if self.differs:
            return "Responses are missing."
        if self.nothing_compared:
            return "Nothing was compared."
        left_out = self.skipped.total()
        return f"No response differs; {_requests(left_out)} left out." if left_out else "No response differs."

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "target": self._target,
            "differs": self.differs,
            "exit_code": self.exit_code,
            "stopped": self.stopped,
            "models": [
                {
                    "model": name, "sent": each.sent, "differing": each.differing,
                    "errors_differing": each.errors_differing, "failed": each.failed,
                    "outputs_compared": each.outputs_compared, "outputs_not_compared": each.outputs_not_compared,
                    "largest_distance": each.largest_distance if math.isfinite(each.largest_distance) else None,
                    "latency_ns": {
                        "recorded": _percentiles(each.recorded_ns), "replayed": _percentiles(each.replayed_ns),
                    },
                }
                for name, each in sorted(self._models.items())
            ],
            "missing_models": self.missing,
            "skipped": dict(self.skipped),
            "kinds_of_differences": [
                {"model": each.model, "count": each.count, "id": each.id, "text": each.text} for each in self.kinds
            ],
            "differences": [{"model": model, "id": id, "text": text} for model, id, text in self.lines],
            "difference_count": self.line_count,
            "notes": self.notes,
        }  # fmt: skip

    def as_text(self, shown: int) -> str:
        """Return the report for people, with at most `shown` kinds of differences."""
        parts: list[str] = []
        if self._models:
            titles = ("Model", "requests", "differ", "errors differ", "no response", "outputs compared",
                      "not compared", "largest distance")  # fmt: skip
            rows = [
                (name, *map(str, (each.sent, each.differing, each.errors_differing, each.failed, each.outputs_compared,
                                  each.outputs_not_compared)),
                 f"{each.largest_distance:.6g}" if each.largest_distance else "-")
                for name, each in sorted(self._models.items())
            ]  # fmt: skip
            parts += (table_text(titles, rows), "\n", self._latency_table())
        lines = [
            f"model '{model}' is not ready at the target: {_requests(count)} not sent"
            for model, count in sorted(self.missing.items())
        ]
        for kind in self.kinds[:shown]:
            first = f"request {kind.id}: " if kind.id else ""
            many = "" if kind.count == 1 else f"{kind.count} times, first: "
            lines.append(f"{kind.model}: {many}{first}{kind.text}")
        if len(self._kinds) > shown:
            rest = sum(kind.count for kind in self.kinds[shown:])
            lines.append(f"… and {rest} more of {len(self._kinds) - shown} other kinds (--show N, or --json)")
        lines += (f"{_requests(count)} {why}" for why, count in self.skipped.items())
        lines += self.notes
        if self.stopped:
            lines.append(f"stopped: {self.stopped}")
        lines.append(self.verdict)
        return "".join((*parts, *(f"{printable(line)}\n" for line in lines)))

    def _latency_table(self) -> str:
        rows = []
        for name, each in sorted(self._models.items()):
            cells = []
            for old, new in zip(_percentiles(each.recorded_ns), _percentiles(each.replayed_ns), strict=True):
                cells += [_milliseconds(old), _milliseconds(new)]
            rows.append((name, *cells))
        titles = [f"p{percentile} {when}" for percentile in _PERCENTILES for when in ("recorded", "now")]
        note = "Recorded: inside the server. Now: seen by this program, with the network.\n"
        return f"{table_text(('Latency in ms', *titles), rows)}{note}\n"


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _percentiles(values: Sequence[int]) -> list[int | None]:
    ordered = sorted(values)
    if not ordered:
        return [None] * len(_PERCENTILES)
    return [ordered[max(0, math.ceil(len(ordered) * each / 100) - 1)] for each in _PERCENTILES]


def _milliseconds(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.2f}"

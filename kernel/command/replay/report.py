"""What a replay has found, as a text and as JSON. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.command.start_messages import table_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.command.replay.comparing import Comparison

_PERCENTILES = (50, 90, 99)


class ReplayedModel(msgspec.Struct):
    """What has become of the requests to one model. Latencies are in nanoseconds."""

    sent: int = 0
    differing: int = 0
    errors_differing: int = 0
    #: Requests that got no response.
    failed: int = 0
    outputs_compared: int = 0
    outputs_not_compared: int = 0
    #: Of requests with a final response on both sides.
    recorded_ns: list[int] = []
    replayed_ns: list[int] = []


class ReplayReport:
    """Collects what a replay finds."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._models: dict[str, ReplayedModel] = {}
        #: Why requests were not sent, or their responses not compared → how many.
        self.skipped: Counter[str] = Counter()
        #: Lines about single requests: the model, the id, and what differs.
        self.lines: list[tuple[str, str, str]] = []
        self.notes: list[str] = []

    def add(self, model: str, id: str, comparison: Comparison, recorded_ns: int | None, replayed_ns: int) -> None:
        """A request was sent and has all its responses."""
        found = self._model(model)
        found.outputs_compared += comparison.compared
        found.outputs_not_compared += comparison.not_compared
        found.differing += bool(comparison.differences)
        found.errors_differing += comparison.errors_differ
        if recorded_ns is not None:
            found.recorded_ns.append(recorded_ns)
            found.replayed_ns.append(replayed_ns)
        self.lines += ((model, id, text) for text in comparison.differences)

    def fail(self, model: str, id: str, why: str) -> None:
        """A request was sent, or was to be sent, and has no response."""
        self._model(model).failed += 1
        self.lines.append((model, id, why))

    def _model(self, name: str) -> ReplayedModel:
        found = self._models.setdefault(name, ReplayedModel())
        found.sent += 1
        return found

    @property
    def differs(self) -> bool:
        """Whether anything differs or has failed."""
        return any(each.differing or each.failed for each in self._models.values())

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "target": self._target,
            "differs": self.differs,
            "models": [
                {
                    "model": name, "sent": each.sent, "differing": each.differing,
                    "errors_differing": each.errors_differing, "failed": each.failed,
                    "outputs_compared": each.outputs_compared, "outputs_not_compared": each.outputs_not_compared,
                    "latency_ns": {
                        "recorded": _percentiles(each.recorded_ns), "replayed": _percentiles(each.replayed_ns),
                    },
                }
                for name, each in sorted(self._models.items())
            ],
            "skipped": dict(self.skipped),
            "differences": [{"model": model, "id": id, "text": text} for model, id, text in self.lines],
            "notes": self.notes,
        }  # fmt: skip

    def as_text(self, shown: int) -> str:
        """Return the report for people, with at most `shown` lines about single requests."""
        titles = ("Model", "requests", "differ", "errors differ", "no response", "outputs compared", "not")
        rows = [
            (name, *map(str, (each.sent, each.differing, each.errors_differing, each.failed, each.outputs_compared,
                              each.outputs_not_compared)))
            for name, each in sorted(self._models.items())
        ]  # fmt: skip
        parts = [table_text(titles, rows), "\n", self._latency_table()]
        for model, id, text in self.lines[:shown]:
            parts.append(f"{model}{f' request {id}' if id else ''}: {text}\n")
        if len(self.lines) > shown:
            parts.append(f"… and {len(self.lines) - shown} more (--show N, or --json)\n")
        parts += (f"{count} request{'' if count == 1 else 's'} {why}\n" for why, count in self.skipped.items())
        parts += (f"{note}\n" for note in self.notes)
        parts.append("Responses differ.\n" if self.differs else "No response differs.\n")
        return "".join(parts)

    def _latency_table(self) -> str:
        rows = []
        for name, each in sorted(self._models.items()):
            cells = []
            for old, new in zip(_percentiles(each.recorded_ns), _percentiles(each.replayed_ns), strict=True):
                cells += [_milliseconds(old), _milliseconds(new)]
            rows.append((name, *cells))
        titles = [f"p{percentile} {when}" for percentile in _PERCENTILES for when in ("recorded", "now")]
        return table_text(("Latency in ms", *titles), rows) + "\n"


def _percentiles(values: Sequence[int]) -> list[int | None]:
    ordered = sorted(values)
    if not ordered:
        return [None] * len(_PERCENTILES)
    return [ordered[max(0, math.ceil(len(ordered) * each / 100) - 1)] for each in _PERCENTILES]


def _milliseconds(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.2f}"

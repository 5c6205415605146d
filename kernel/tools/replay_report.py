"""Compares recorded responses with new ones, and says what a replay has found, as a text and as JSON. Pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.texts import printable
from kernel.tools.printing import table_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernel.records.recording_format import RecordedTensor, ResponseRecord
    from kernel.records.replay_target import ReplayedOutput, ReplayedResponse

_FLOATS = ("FP16", "FP32", "FP64", "BF16")


class Tolerance(msgspec.Struct, frozen=True):
    """How far numbers may be from the recorded ones: `absolute + relative * |recorded|`. With zeros, bytes count."""

    relative: float = 0.0
    absolute: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether bytes must be equal."""
        return not self.relative and not self.absolute


class Comparison(msgspec.Struct):
    """What a comparison of one request's responses has found."""

    #: A line for each difference.
    differences: list[str] = []
    #: How many outputs were compared, and how many could not be, because their values are not in the recording.
    compared: int = 0
    not_compared: int = 0
    #: Whether one of the differences is an error, on either side.
    errors_differ: bool = False
    #: How far a number is from the recorded one at most, where that is more than the tolerance.
    largest_distance: float = 0.0


def compare(recorded: Sequence[ResponseRecord], found: Sequence[ReplayedResponse], tolerance: Tolerance) -> Comparison:
    """Compare all responses of a request; those that only mark the end do not count."""
    comparison = Comparison()
    expected = [each for each in recorded if each.outputs is not None or each.error]
    for number, (old, new) in enumerate(zip(expected, found, strict=False), 1):
        where = f"response {number}: " if len(expected) > 1 else ""
        if old.error or new.error:
            if old.error != new.error:
                comparison.errors_differ = True
                comparison.differences.append(f"{where}{_error_text(old.error, new.error)}")
            continue
        for text in _compare_outputs(old.outputs or (), new.outputs, tolerance, comparison):
            comparison.differences.append(where + text)
    if len(expected) != len(found):
        comparison.differences.append(f"{len(expected)} responses were recorded, now there are {len(found)}")
        errors = [*(each.error for each in expected[len(found) :]), *(each.error for each in found[len(expected) :])]
        comparison.errors_differ = comparison.errors_differ or any(errors)
    return comparison


def _error_text(old: str, new: str) -> str:
    if not old:
        return f"an error that was not recorded: {new}"
    if not new:
        return f"no error, and recorded was: {old}"
    return f"another error: {new}; recorded was: {old}"


def _compare_outputs(
    old: Sequence[RecordedTensor], new: Sequence[ReplayedOutput], tolerance: Tolerance, comparison: Comparison
) -> Iterator[str]:
    found = {output.name: output for output in new}
    for tensor in old:
        output = found.pop(tensor.name, None)
        if output is None:
            yield f"output '{tensor.name}' is missing"
            continue
        kinds = [f"{each.datatype} {each.shape}" for each in (tensor, output)]
        if kinds[0] != kinds[1]:
            yield f"output '{tensor.name}' is {kinds[1]}, and recorded was {kinds[0]}"
        elif tensor.data is None and tensor.sha256 is None and (tensor.region or tensor.missing):
            comparison.not_compared += 1
        else:
            comparison.compared += 1
            if (text := _compare_values(tensor, output, tolerance, comparison)) is not None:
                yield f"output '{tensor.name}' {text}"
    for name in found:
        yield f"output '{name}' was not recorded"


def _compare_values(
    tensor: RecordedTensor, output: ReplayedOutput, tolerance: Tolerance, comparison: Comparison
) -> str | None:
    """Return how values differ; None if they do not."""
    if tensor.sha256 is not None:
        same = hashlib.sha256(output.data).digest() == tensor.sha256
        return None if same else "differs; only its digest was recorded"
    old, new = tensor.data or b"", output.data
    if old == new:
        return None
    if len(old) != len(new) and tensor.datatype != "BYTES":
        return f"has {len(new)} bytes, and recorded were {len(old)}"
    try:
        was, now = (_array(tensor.datatype, tensor.shape, data) for data in (old, new))
    except (ValueError, KeyError):
        return "has other bytes"
    if tensor.datatype == "BYTES":
        return _compare_texts(was, now)
    return _compare_numbers(was, now, tensor.datatype in _FLOATS, tolerance, comparison)


def _compare_texts(old: Any, new: Any) -> str:
    differing = [index for index, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
    first = differing[0]
    return (
        f"differs in {len(differing)} of {len(old)} elements; element {first} is {_short(new[first])}, and recorded "
        f"was {_short(old[first])}"
    )


def _compare_numbers(old: Any, new: Any, floats: bool, tolerance: Tolerance, comparison: Comparison) -> str | None:
    import numpy as np  # only where outputs differ

    unequal = ~((old == new) | (np.isnan(old) & np.isnan(new))) if floats else old != new
    if not unequal.any():
        return "has equal values in other bytes (signs of zeros, or NaNs)" if tolerance.exact else None
    with np.errstate(all="ignore"):
        distance = np.abs(new.astype(np.float64) - old.astype(np.float64))
        allowed = tolerance.absolute + tolerance.relative * np.abs(old.astype(np.float64))
        beyond = unequal & ~(distance <= allowed)  # a distance that is NaN or infinite is beyond
    if not tolerance.exact and not beyond.any():
        return None
    worst = int(np.argmax(np.where(beyond, np.nan_to_num(distance, nan=np.inf, posinf=np.inf), -1.0)))
    comparison.largest_distance = max(comparison.largest_distance, float(np.nan_to_num(distance[worst], nan=np.inf)))
    return (
        f"differs in {int(beyond.sum())} of {old.size} elements, by at most {distance[worst]:.6g}; element {worst} is "
        f"{new[worst]}, and recorded was {old[worst]}"
    )


def _array(datatype: str, shape: Sequence[int], data: bytes) -> Any:
    """Return a flat array of the elements. Raises ValueError, and KeyError for an unknown datatype."""
    import numpy as np  # as above

    from shm.arrays import to_array

    if datatype == "BF16":  # the upper half of an FP32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return to_array(datatype, shape, data).reshape(-1)


def _short(element: bytes) -> str:
    text = repr(bytes(element[:61]))
    return text if len(element) <= 60 else f"{text}…"


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

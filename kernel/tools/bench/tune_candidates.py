"""What `naiad tune` tries and what it has measured. Pure.

`find_best` tries one setting after the other, from the best configuration so far. Settings are changed in the JSON of a
load request, and in the text of a config.pbtxt. Rows of what was measured become a table, and one of them is the best.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.tools.bench.report import aligned, duration
from kernel.tools.bench.results import PointRow  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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


#: The fields of a configuration that are replaced.
FIELDS = ("max_batch_size", "instance_group", "dynamic_batching")

_DELAY = "max_queue_delay_microseconds"


def candidate_of(config: dict[str, Any]) -> TuneCandidate:
    """Return what a configuration has now."""
    groups = config.get("instance_group") or [{}]
    batching = config.get("dynamic_batching")
    delay = int(batching.get(_DELAY, 0)) if batching is not None else None
    return TuneCandidate(int(groups[0].get("count", 1)), int(config.get("max_batch_size", 0)), delay)


def why_not(config: dict[str, Any]) -> str:
    """Return why a model cannot be tuned, or nothing."""
    if config.get("platform") == "ensemble" or "ensemble_scheduling" in config:
        return "it is an ensemble: tune the models of its steps"
    if config.get("model_transaction_policy", {}).get("decoupled"):
        return "it is decoupled, and its responses say nothing about a rate of requests; measure it with 'naiad bench'"
    if "sequence_batching" in config:
        return "it has sequences, whose state a reload would end; measure it with 'naiad bench --sequence'"
    return ""


def with_candidate(config: dict[str, Any], candidate: TuneCandidate) -> dict[str, Any]:
    """Return a configuration with the settings of a candidate."""
    found = copy.deepcopy(config)
    found["max_batch_size"] = candidate.max_batch_size
    groups = found.get("instance_group") or [{}]
    for group in groups:
        group["count"] = candidate.instances
    found["instance_group"] = groups
    if candidate.delay_us is None:
        found.pop("dynamic_batching", None)
    else:
        batching = found.setdefault("dynamic_batching", {})
        batching[_DELAY] = candidate.delay_us
        sizes = batching.pop("preferred_batch_size", [])
        # A server fills in the largest batch where a configuration says nothing: that is no wish.
        if sizes != [config.get("max_batch_size")] and max(sizes, default=0) <= candidate.max_batch_size:
            batching["preferred_batch_size"] = sizes
    return found


def batch_sizes(config: dict[str, Any]) -> list[int]:
    """Return the largest batches to try: what the model has now, and more. Less would refuse requests of today."""
    now = int(config.get("max_batch_size", 0))
    return [now, *(size for size in (8, 16, 32, 64) if size > now)] if now else []


#: A top-level field of protobuf's text: its name, and what begins its value.
_FIELD = re.compile(r"([A-Za-z_]\w*)\s*(:?)\s*")

_STRING = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'")


def without_fields(text: str, names: Iterable[str]) -> str:
    """Return the text of a config.pbtxt without some top-level fields. Everything else, with comments, stays."""
    removed = set(names)
    kept: list[str] = []
    position = 0
    while position < len(text):
        match = _FIELD.match(text, position)
        if match is None:
            end = _after_token(text, position)
            kept.append(text[position:end])
            position = end
            continue
        end = _end_of_value(text, match.end())
        if match[1] in removed:
            # The field's line goes, unless something else is on it.
            rest = re.match(r"[ \t]*[,;]?[ \t]*\n?", text[end:])
            end += rest.end() if rest else 0
        else:
            kept.append(text[position:end])
        position = end
    return "".join(kept)


def _after_token(text: str, position: int) -> int:
    """Return the end of a comment, a text in quotes, or a character."""
    if text[position] == "#":
        end = text.find("\n", position)
        return len(text) if end < 0 else end + 1
    if match := _STRING.match(text, position):
        return match.end()
    return position + 1


def _end_of_value(text: str, position: int) -> int:
    """Return the end of a field's value: of a bracket that closes, or of a word or text."""
    depth = 0
    while position < len(text):
        character = text[position]
        end = _after_token(text, position)
        if character in "{[<":
            depth += 1
        elif character in "}]>":
            depth -= 1
            if not depth:
                return end
        elif not depth and character not in "#\"'" and not character.isspace():
            match = re.compile(r"[^\s,;#\]\}]+").match(text, position)
            return match.end() if match else end
        elif not depth and character in "\"'":
            return end
        position = end
    return position


def pbtxt_of(config: dict[str, Any]) -> str:
    """Return the replaced fields of a configuration as protobuf's text."""
    lines = [f"max_batch_size: {config['max_batch_size']}"]
    for group in config["instance_group"]:
        parts = [f"count: {group['count']}"]
        if kind := group.get("kind"):
            parts.append(f"kind: {kind}")
        if gpus := group.get("gpus"):
            parts.append(f"gpus: [{', '.join(map(str, gpus))}]")
        if group.get("passive"):
            parts.append("passive: true")
        lines.append(f"instance_group [{{ {' '.join(parts)} }}]")
    if "dynamic_batching" in config:
        parts = []
        if sizes := config["dynamic_batching"].get("preferred_batch_size"):
            parts.append(f"preferred_batch_size: [{', '.join(map(str, sizes))}]")
        if delay := config["dynamic_batching"].get(_DELAY):
            parts.append(f"{_DELAY}: {delay}")
        lines.append(" ".join(["dynamic_batching {", *parts, "}"]))
    return "".join(f"{line}\n" for line in lines)


#: Settings of the replaced fields that `pbtxt_of` does not write, so that they would be lost.
_WRITTEN_GROUP = {"name", "count", "kind", "gpus", "passive", "host_policy", "profile", "secondary_devices"}

_WRITTEN_BATCHING = {"preferred_batch_size", _DELAY}


def lost_settings(config: dict[str, Any]) -> list[str]:
    """Return the names of settings that `pbtxt_of` cannot write: then a person must put the new values in."""
    found = {
        name
        for group in config.get("instance_group", [])
        for name, value in group.items()
        if value and (name not in _WRITTEN_GROUP or name in ("host_policy", "profile", "secondary_devices"))
    }
    batching = config.get("dynamic_batching", {})
    found |= {name for name, value in batching.items() if value and name not in _WRITTEN_BATCHING}
    return sorted(found)


def new_text(text: str, config: dict[str, Any]) -> str:
    """Return the text of a config.pbtxt with the replaced fields of `config` at its end."""
    kept = without_fields(text, FIELDS).rstrip("\n")
    return (f"{kept}\n\n" if kept else "") + pbtxt_of(config)


class LatencyGoal(msgspec.Struct, frozen=True):
    """The latency that must not be exceeded."""

    #: Milliseconds; 0 for none.
    ms: float
    #: As in `PointRow`, such as "99".
    percent: str

    def met_by(self, row: PointRow) -> bool:
        """Return whether a load has met it, without a failure."""
        return bool(row.completed) and not row.failed and (not self.ms or self.of(row) <= self.ms * 1e3)

    def of(self, row: PointRow) -> float:
        """Return the latency that is compared, in microseconds."""
        return row.latency.percentiles[self.percent]

    def text(self) -> str:
        """Return it in words."""
        return f"p{self.percent} of at most {self.ms:g} ms" if self.ms else "no latency goal"


def load_problem(error: str) -> str:
    """Return the reason of a load that has failed, in one line, from the error that the server has returned."""
    first = next((line for line in error.splitlines() if line.strip()), "")
    return first.rpartition("is at UNAVAILABLE state: ")[2]


class TuneRow(msgspec.Struct, frozen=True):
    """A configuration and its loads; `problem` says in one line why it cannot be served."""

    candidate: TuneCandidate
    loads: list[PointRow]
    problem: str = ""

    def best(self, goal: LatencyGoal) -> PointRow | None:
        """Return the load with the highest rate within the goal; None if none is within it."""
        return max((row for row in self.loads if goal.met_by(row)), key=lambda row: row.rate, default=None)


def goes_on(loads: Sequence[PointRow], goal: LatencyGoal) -> bool:
    """Return whether more requests in flight could bring a higher rate within the goal."""
    if any(row.failed for row in loads):
        return False
    # Twice in a row too slow: once may be a disturbance.
    if len(loads) > 1 and not goal.met_by(loads[-1]) and not goal.met_by(loads[-2]):
        return False
    # Twice in a row no more responses: the model is busy, and more requests only wait.
    return len(loads) < 3 or loads[-1].rate > 1.03 * min(loads[-2].rate, loads[-3].rate)


def table_of(rows: Sequence[TuneRow], goal: LatencyGoal, best: TuneCandidate | None) -> str:
    """Return the table: the loads with the highest rates within the goal."""
    lines = [["", "instances", "max batch", "delay", "requests/s", "in flight", f"p{goal.percent}", "batch", ""]]
    for row in rows:
        found = row.best(goal)
        delay = "off" if row.candidate.delay_us is None else f"{row.candidate.delay_us} us"
        settings = [str(row.candidate.instances), str(row.candidate.max_batch_size or "none"), delay]
        mark = "best" if row.candidate == best else ""
        if found is None:
            why = row.problem or (f"no load has {goal.text()}" if row.loads else "not measured")
            lines.append([mark, *settings, "-", "-", "-", "-", why[:80]])
            continue
        batch = f"{found.server.mean_batch:.1f}" if found.server is not None else ""
        lines.append(
            [mark, *settings, f"{found.rate:,.0f}", str(found.connections), duration(goal.of(found)), batch, ""]
        )
    return aligned(lines)

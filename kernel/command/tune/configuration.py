"""The settings that `naiad tune` changes: in the JSON of a load request, and in the text of a config.pbtxt. Pure."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from kernel.command.tune.search import TuneCandidate

if TYPE_CHECKING:
    from collections.abc import Iterable

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

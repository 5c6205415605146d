"""Traces as spans of OpenTelemetry: names, attributes and events are Triton's (tracer.cc). Pure.

A client's request is a span `InferRequest` with a span of its model in it; where the model executes, this has a span
`compute`. The models of an ensemble's steps, and those that a model calls, have their spans in that of their caller.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from kernel.tracing.trace import (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
    RESPONSE_COMPLETE,
)

if TYPE_CHECKING:
    from kernel.tracing.trace import SpanIds, TraceRecord

_OF_MODEL = {REQUEST_START, QUEUE_START, REQUEST_END}
_OF_COMPUTE = {COMPUTE_START, COMPUTE_INPUT_END, COMPUTE_OUTPUT_START, COMPUTE_END}
_OF_FRONT_DOORS = ("HTTP_", "GRPC_")

#: A custom activity whose name ends so begins or ends a span of its own.
_BEGIN, _END = "_START", "_END"

Event = tuple[str, int]


class TraceSpan(msgspec.Struct):
    """One span; times in monotonic nanoseconds."""

    name: str
    #: 16 hexadecimal digits; the parent's are empty for the first span of a trace.
    id: str
    parent_id: str
    start_ns: int
    end_ns: int
    events: list[Event] = []
    attributes: dict[str, str | int] = {}
    error: str = ""


def spans_of(record: TraceRecord) -> list[TraceSpan]:
    """Return the spans of a trace that has ids for them, the outer ones first."""
    ids = record.spans
    assert ids is not None, "a trace without the ids of OpenTelemetry"
    times = record.pairs()
    of_model = [each for each in times if each[0] in _OF_MODEL]
    of_compute = [each for each in times if each[0] in _OF_COMPUTE]
    of_door = [each for each in times if each[0] == RESPONSE_COMPLETE or each[0].startswith(_OF_FRONT_DOORS)]
    found = [TraceSpan(
        record.model_name, ids.model, ids.root or ids.parent, of_model[0][1], of_model[-1][1], of_model,
        _attributes(record), record.error,
    )]  # fmt: skip
    if not record.parent_id:
        found.insert(
            0, TraceSpan("InferRequest", ids.root, ids.parent, times[0][1], times[-1][1], of_door, {}, record.error)
        )
    if of_compute:
        found.append(TraceSpan("compute", ids.compute, ids.model, of_compute[0][1], of_compute[-1][1], of_compute))
    known = {*of_model, *of_compute, *of_door}
    _add_custom(found, [each for each in times if each not in known], ids)
    return found


def _attributes(record: TraceRecord) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "triton.model_name": record.model_name,
        "triton.model_version": record.model_version,
        "triton.trace_id": record.id,
        "triton.trace_parent_id": record.parent_id,
    }
    if record.request_id:
        attributes["triton.request_id"] = record.request_id
    return attributes


def _add_custom(spans: list[TraceSpan], activities: list[Event], ids: SpanIds) -> None:
    """Add what a backend has reported: spans where a beginning has an end, else events of the innermost span."""
    inner = spans[-1]
    begun: dict[str, list[int]] = {}
    for name, at_ns in activities:
        base = name.removesuffix(_END)
        if name.endswith(_BEGIN) and name != _BEGIN:  # a span has a name
            begun.setdefault(name.removesuffix(_BEGIN), []).append(at_ns)
        elif base != name and begun.get(base):
            start_ns = begun[base].pop()
            id = hashlib.blake2b(f"{ids.compute} {base} {start_ns}".encode(), digest_size=8).hexdigest()
            events = [(f"{base}{_BEGIN}", start_ns), (name, at_ns)]
            spans.append(TraceSpan(base, id, inner.id, start_ns, at_ns, events))
        else:
            inner.events.append((name, at_ns))
    for base, starts in begun.items():
        inner.events += ((f"{base}{_BEGIN}", at_ns) for at_ns in starts)
    inner.events.sort(key=lambda each: each[1])

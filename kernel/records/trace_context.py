"""W3C trace context: the headers `traceparent` and `tracestate`. Pure. (https://www.w3.org/TR/trace-context/)"""

from __future__ import annotations

import json
import re

import msgspec

#: Version, trace id, parent id, flags. A later version may have more behind them.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_SAMPLED = 1

#: Longer states are dropped (§3.3.1.5 asks for 512 characters at least).
_MAX_STATE_LENGTH = 1024


class CallerContext(msgspec.Struct, frozen=True):
    """What a client says about the trace that its request belongs to."""

    #: 32 and 16 hexadecimal digits.
    trace_id: str
    span_id: str
    #: Whether the client records its own part, and so wants ours.
    sampled: bool
    state: str = ""


def parse_trace_context(traceparent: str, tracestate: str = "") -> CallerContext | None:
    """Return the context in the values of the two headers; None if `traceparent` is empty or wrong (§3.2)."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or (found[1] == "00" and found[5]):
        return None
    state = tracestate if tracestate.isascii() and len(tracestate) <= _MAX_STATE_LENGTH else ""
    return CallerContext(found[2], found[3], bool(int(found[4], 16) & _SAMPLED), state)


def context_as_json(traceparent: str, tracestate: str = "") -> str | None:
    """Return what `InferenceTrace.get_context()` of a Python model returns; None without a context."""
    if not traceparent:
        return None
    context = {"traceparent": traceparent}
    if tracestate:
        context["tracestate"] = tracestate
    return json.dumps(context)

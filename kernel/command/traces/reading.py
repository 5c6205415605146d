"""Reads trace files, ours and Triton's: what they say of each request, and which request has caused which. Pure."""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Event = tuple[str, int]


class ReadTrace(msgspec.Struct, eq=False):
    """One trace; times in monotonic nanoseconds of the server."""

    id: int
    model_name: str = ""
    model_version: int = 0
    request_id: str = ""
    parent_id: int = 0
    error: str = ""
    #: In the order of time.
    events: list[Event] = []
    #: Activity, and name, data, shape and dtype of the tensor.
    tensors: list[tuple[str, dict[str, Any]]] = []
    children: list[ReadTrace] = []

    @property
    def title(self) -> str:
        """Model and version, for people."""
        return f"{self.model_name}:{self.model_version}"

    @property
    def protocol(self) -> str:
        """`HTTP`, `gRPC`, or empty for a trace that no front door has begun."""
        for name, _ in self.events:
            if name.startswith("HTTP_"):
                return "HTTP"
            if name.startswith("GRPC_"):
                return "gRPC"
        return ""

    def first(self, name: str) -> int | None:
        """Return when `name` was for the first time; None if never."""
        return next((at_ns for found, at_ns in self.events if found == name), None)

    def last(self, name: str) -> int | None:
        """Return when `name` was for the last time; None if never."""
        return next((at_ns for found, at_ns in reversed(self.events) if found == name), None)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ReadTrace]]:
        """Return this trace and all that it has caused, with their depths, in the order in which they began."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def read_traces(title: str, data: bytes) -> list[ReadTrace]:
    """Return the traces in a file that no other trace in it has caused. Raises `BadOption` for a file without traces.

    `title` names the file in errors.
    """
    try:
        objects = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = " (Triton writes quotes in text tensors unescaped)" if b'"TENSOR_' in data else ""
        raise BadOption(f"{title} is not JSON: {error}{hint}") from None
    if not isinstance(objects, list):
        raise BadOption(f"{title} has no traces: expected a JSON list")
    found: dict[int, ReadTrace] = {}
    for each in objects:
        if not isinstance(each, dict) or not isinstance(each.get("id"), int):
            raise BadOption(f"{title} has no traces: expected objects with an id")
        trace = found.get(each["id"])
        if trace is None:
            trace = found[each["id"]] = ReadTrace(each["id"], events=[], tensors=[], children=[])
        try:
            _add(trace, each)
        except (KeyError, TypeError, ValueError):
            raise BadOption(f"{title} has an object that is not a trace, with id {each['id']}") from None
    return _as_trees(found.values())


def _add(trace: ReadTrace, entry: dict[str, Any]) -> None:
    if "model_name" in entry:
        trace.model_name, trace.model_version = str(entry["model_name"]), int(entry["model_version"])
        trace.request_id = str(entry.get("request_id", ""))
        trace.parent_id = int(entry.get("parent_id", 0))
        trace.error = str(entry.get("error", ""))
    for each in entry.get("timestamps", ()):
        trace.events.append((str(each["name"]), int(each["ns"])))
    if "tensor" in entry:
        trace.tensors.append((str(entry["activity"]), dict(entry["tensor"])))


def _as_trees(traces: Iterable[ReadTrace]) -> list[ReadTrace]:
    by_id = {trace.id: trace for trace in traces if trace.events}
    children: defaultdict[int, list[ReadTrace]] = defaultdict(list)
    for trace in by_id.values():
        trace.events.sort(key=itemgetter(1))
        # A parent that is missing, because its file is another one, leaves its children on their own.
        children[trace.parent_id if trace.parent_id in by_id and trace.parent_id != trace.id else 0].append(trace)
    for each in children.values():
        each.sort(key=lambda trace: (trace.events[0][1], trace.id))
    for trace in by_id.values():
        trace.children = children.get(trace.id, [])
    return children[0]

"""Queues of dynamic batchers: what happens while an instance is busy.

All requests of a step come on one stream, so they are queued in their order. The first one keeps the instance busy.
"""

from __future__ import annotations

import struct
from typing import Any

from bench.oracle.steps import Case, Document, Step, rpc, stream


def request(
    model: str, id: str, values: int | list[int] = 0, *, rows: int = 1, more: bool = False, **parameters: int
) -> tuple[Document, list[bytes]]:
    """Return a request and its tensors: `values` are those of each row, of which the first is milliseconds."""
    row = [values] if isinstance(values, int) else values
    inputs: list[Document] = [{"name": "MS", "datatype": "INT32", "shape": [rows, len(row)]}]
    raw = [struct.pack(f"<{len(row) * rows}i", *row * rows)]
    if more:
        inputs.append({"name": "MORE", "datatype": "INT32", "shape": [rows, 1]})
        raw.append(bytes(4 * rows))
    kinds = {"priority": "uint64_param", "timeout": "int64_param"}
    given: Any = {name: {kinds[name]: value} for name, value in parameters.items()}
    return {"model_name": f"queue_{model}", "id": id, "inputs": inputs, "parameters": given}, raw


def on_one_stream(*requests: tuple[Document, list[bytes]]) -> Step:
    return stream([document for document, _ in requests], [raw for _, raw in requests])


def levels(id: str, priority: int, values: int = 0) -> tuple[Document, list[bytes]]:
    return request("levels", id, values, priority=priority)


CASES = [
    Case(
        "priorities",
        on_one_stream(
            levels("first", 1, 601),
            levels("low", 3),
            levels("none", 0),
            levels("high", 1),
            levels("middle", 2),
            levels("unknown", 7),
            levels("high again", 1),
        ),
    ),
    Case(
        "delayed requests go behind the others of their level",
        on_one_stream(levels("first", 1, 601), levels("delayed", 3), levels("second", 1, 300), levels("high", 2)),
        on_one_stream(
            levels("first", 1, 601),
            *(levels(str(number), 3) for number in range(6)),
            levels("default", 0),
        ),
    ),
    Case(
        "limits of a queue",
        on_one_stream(request("limits", "first", 301), *(request("limits", str(number)) for number in range(5))),
        on_one_stream(
            request("limits", "first", 2501),
            request("limits", "short", timeout=200_000),
            request("limits", "long", timeout=5_000_000),
            request("limits", "none"),
        ),
        on_one_stream(
            request("limits", "first", 401), request("limits", "long", timeout=5_000_000), request("limits", "b")
        ),
        rpc("ModelStatistics", {"name": "queue_limits"}),
    ),
    Case(
        "without a default timeout a request cannot have one",
        on_one_stream(request("override", "first", 401), request("override", "second", timeout=100_000)),
    ),
    Case(
        "preferred sizes",
        on_one_stream(request("batches", "lone", 1)),
        on_one_stream(*(request("batches", str(number), 1 if not number else 0) for number in range(2))),
        on_one_stream(
            request("batches", "first", 401, rows=4), *(request("batches", str(number)) for number in range(6))
        ),
        on_one_stream(
            request("batches", "a", 401, rows=4),
            request("batches", "b", rows=3),
            request("batches", "c", rows=3),
            request("batches", "d"),
            request("batches", "e", rows=3),
        ),
        on_one_stream(request("batches", "too many", 1, rows=5), request("batches", "right", 1, rows=4)),
        rpc("ModelStatistics", {"name": "queue_batches"}),
    ),
    Case(
        "shapes",
        on_one_stream(
            request("shapes", "a", [1, 0]),
            request("shapes", "b", [0, 0], rows=2),
            request("shapes", "c", [0]),
            request("shapes", "d", [0]),
            request("shapes", "e", [0, 0]),
        ),
    ),
    Case(
        "optional inputs",
        on_one_stream(
            request("shapes", "a", 1),
            request("shapes", "b", more=True),
            request("shapes", "c", more=True),
            request("shapes", "d"),
        ),
    ),
    Case(
        "ragged",
        on_one_stream(
            request("ragged", "a", [1, 0]),
            request("ragged", "b", [0]),
            request("ragged", "c", [0, 0, 0], rows=2),
            request("ragged", "d", [0], rows=4),
            request("ragged", "e", [0], rows=2),
        ),
    ),
]

"""Sequences: flags, ids, the errors of the sequence batcher, the backlog, and requests that the model reschedules."""

from __future__ import annotations

import struct
from typing import Any

from bench.oracle.steps import Case, Step, get, infer, racing, rpc, stream, tensor

DIRECT, OLDEST, TEXT, AGAIN, BRIEF = "direct", "oldest", "text", "again", "brief"


def send(model: str, sequence: int | str | None, value: int, *, rows: int = 1, **more: Any) -> Step:
    """One request of a sequence over HTTP."""
    told = {**({} if sequence is None else {"sequence_id": sequence}), **more}
    inputs = [tensor("IN", "INT32", [rows, 1], [value] * rows)]
    return infer(model, {"inputs": inputs, "parameters": told, "id": "7"})


def call(model: str, sequence: int | str | None, value: int, *, start: bool = False, end: bool = False) -> Step:
    """One request of a sequence over gRPC."""
    return rpc("ModelInfer", request(model, sequence, value, start=start, end=end), [struct.pack("<i", value)])


def request(model: str, sequence: int | str | None, value: int, *, start: bool = False, end: bool = False) -> Any:
    kind = "string_param" if isinstance(sequence, str) else "int64_param"
    told: dict[str, Any] = {"sequence_start": {"bool_param": start}, "sequence_end": {"bool_param": end}}
    if sequence is not None:
        told["sequence_id"] = {kind: sequence}
    return {"model_name": model, "id": str(value), "inputs": [tensor("IN", "INT32", [1, 1])], "parameters": told}


def both(name: str, make: Any) -> list[Case]:
    """The same case for both strategies."""
    return [Case(f"{name}, {model}", *make(model)) for model in (DIRECT, OLDEST)]


def streamed(model: str, *requests: tuple[int, int, bool, bool]) -> Step:
    return stream(
        [request(model, sequence, value, start=start, end=end) for sequence, value, start, end in requests],
        [[struct.pack("<i", value)] for _, value, _, _ in requests],
    )


GARBAGE = "Triton 2.51 gives the model the bytes of a pointer as the number, ours a digest of the text"
BROKEN = "Triton 2.51 fails to give a Python model an id that is a text"


def summed(value: int, seen: str, model: str = TEXT) -> dict[str, Any]:
    """The response of ours to `send`."""
    outputs = [
        {"data": [value], "datatype": "INT32", "name": "SUM", "shape": [1, 1]},
        {"data": [seen], "datatype": "BYTES", "name": "SEEN", "shape": [1, 1]},
    ]
    found = {"id": "7", "model_name": model, "model_version": "1", "outputs": outputs}
    return {"status": "http 200", "body": {"content-type": "application/json", "json": found}, "error": None}


CASES = [
    *both(
        "a sequence from start to end",
        lambda model: [
            send(model, 11, 1, sequence_start=True),
            send(model, 11, 2),
            call(model, 11, 3),
            send(model, 11, 4, sequence_end=True),
            send(model, 11, 5),
            call(model, 11, 6),
        ],
    ),
    *both(
        "one request is a whole sequence",
        lambda model: [
            send(model, 12, 1, sequence_start=True, sequence_end=True),
            send(model, 12, 2, sequence_end=True),
            call(model, 12, 3, start=True, end=True),
        ],
    ),
    *both(
        "start of a sequence that lives",
        lambda model: [
            send(model, 13, 1, sequence_start=True),
            send(model, 13, 2),
            send(model, 13, 3, sequence_start=True),
            send(model, 13, 4, sequence_end=True),
            send(model, 13, 5),
        ],
    ),
    *both(
        "requests that are refused",
        lambda model: [
            send(model, None, 1),
            send(model, 0, 1, sequence_start=True),
            send(model, "", 1, sequence_start=True),
            call(model, None, 1, start=True),
            call(model, "", 1, start=True),
            send(model, "text", 1, sequence_start=True, sequence_end=True).differs(GARBAGE, body=...),
            call(model, "text", 1, start=True, end=True).differs(GARBAGE, body=...),
            send(model, 14, 1),
            send(model, 14, 1, sequence_end=True),
            send(model, 14, 1, rows=2, sequence_start=True),
            send(model, 14, 1, rows=2),
            send(model, None, 1, rows=2),
            send(model, 14, 1, rows=3, sequence_start=True),
            send(model, -1, 1, sequence_start=True),
            send(model, 2**64 - 1, 1, sequence_start=True, sequence_end=True),
            send(model, 2**64, 1, sequence_start=True),
            call(model, -1, 1, start=True, end=True),
        ],
    ),
    Case(
        "ids that are text",
        send(TEXT, "a b", 1, sequence_start=True).differs(BROKEN, **summed(1, "1 0.0 a b 1")),
        send(TEXT, "a b", 2, sequence_end=True).differs(BROKEN, **summed(3, "0 1.0 a b 2")),
        send(TEXT, "\u00e4", 3, sequence_start=True, sequence_end=True).differs(BROKEN, **summed(3, "1 1.0 \u00e4 3")),
        send(TEXT, 5, 1, sequence_start=True, sequence_end=True).differs(BROKEN, **summed(1, "1 1.0 5 3")),
        send(TEXT, None, 1),
        send(TEXT, "", 1, sequence_start=True),
        call(TEXT, "", 1, start=True),
        send(TEXT, "no start", 1),
        send(TEXT, "x" * 128, 1, sequence_start=True, sequence_end=True),
        send(TEXT, "x" * 129, 1, sequence_start=True, sequence_end=True),
        call(TEXT, "x" * 129, 1, start=True, end=True),
        send(TEXT, "\u00e4" * 65, 1, sequence_start=True, sequence_end=True),
    ),
    *both(
        "a stream of a sequence",
        lambda model: [
            streamed(model, (21, 1, True, False), (21, 2, False, False), (21, 3, False, True), (21, 4, False, False))
        ],
    ),
    *both(
        "a sequence waits for a slot",
        lambda model: [
            send(model, 31, 1, sequence_start=True),
            send(model, 32, 1, sequence_start=True),
            racing(
                (0, send(model, 33, 5, sequence_start=True, sequence_end=True)),
                (300, send(model, 31, 2, sequence_end=True)),
                order=False,
            ),
            send(model, 32, 2, sequence_end=True),
        ],
    ),
    *both(
        "a request times out while its sequence waits for a slot",
        lambda model: [
            send(model, 34, 1, sequence_start=True),
            send(model, 35, 1, sequence_start=True),
            send(model, 36, 5, sequence_start=True, timeout=200_000),
            send(model, 36, 5),
            send(model, 34, 2, sequence_end=True),
            send(model, 35, 2, sequence_end=True),
        ],
    ),
    Case(
        "a sequence that is idle ends",
        send(BRIEF, 51, 1, sequence_start=True),
        racing((1500, send(BRIEF, 51, 2)), order=False),
        send(BRIEF, 51, 3, sequence_start=True, sequence_end=True),
        get(f"/v2/models/{BRIEF}/stats", ignore=("ns", "last_inference")),
    ),
    Case(
        "a request that the model reschedules",
        send(AGAIN, None, 1),
        send(AGAIN, None, 3),
        call(AGAIN, None, 4),
        get(f"/v2/models/{AGAIN}/stats", ignore=("ns", "last_inference", "inference_stats")),
        send(AGAIN, 41, 3, sequence_start=True),
        send(AGAIN, 41, 2),
        send(AGAIN, 42, 3, sequence_start=True, sequence_end=True).differs(
            "Triton does not respond to a request with the END flag that its model reschedules",
            **summed(3, "300", model=AGAIN),
        ),
        send(AGAIN, 43, 2),
        send(AGAIN, None, 2, sequence_start=True, sequence_end=True),
    ),
]

"""Sequences: controls of all types, both strategies, flags, idle timeouts, errors, more sequences than slots.

Every case loads `late_sequence` with a configuration of its own, and unloads it. The model adds up the values of each
sequence and tells its control tensors. A negative value -n takes n milliseconds.

With the strategy `direct` no request is in slot 1 while slot 0 has none: Triton 2.51 never answers then.
"""

from __future__ import annotations

import json
from typing import Any

from bench.oracle.steps import Case, Document, Step, get, infer, post, racing, rpc, stream, tensor

MODEL = "late_sequence"
STATISTICS = get(f"/v2/models/{MODEL}/stats")
UNLOAD = post(f"/v2/repository/models/{MODEL}/unload", {})
#: Nothing happens for 0.7 s.
PAUSE = racing((0, get("/v2/health/live")), (700, get("/v2/health/live")), order=False)


def control(name: str, kind: str, **values: Any) -> Document:
    return {"name": name, "control": [{"kind": f"CONTROL_SEQUENCE_{kind}", **values}]}


INT32 = {"int32_false_true": [0, 1]}
START, END, READY = (control(kind, kind, **INT32) for kind in ("START", "END", "READY"))
CORRID = control("CORRID", "CORRID", data_type="TYPE_UINT64")
ALL = (START, END, READY, CORRID)


def load(*controls: Document, batch: int = 8, instances: int = 1, **sequences: Any) -> Step:
    """Load the model with these controls and settings of sequence_batching."""
    config = {
        "backend": "python",
        "max_batch_size": batch,
        "instance_group": [{"kind": "KIND_CPU", "count": instances}],
        "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [
            {"name": "SUM", "data_type": "TYPE_INT32", "dims": [1]},
            {"name": "TOLD", "data_type": "TYPE_STRING", "dims": [1]},
        ],
        "sequence_batching": {
            "control_input": list(controls),
            "max_sequence_idle_microseconds": 10_000_000,
            **sequences,
        },
    }
    return post(f"/v2/repository/models/{MODEL}/load", {"parameters": {"config": json.dumps(config)}})


def send(sequence: int | str | None, value: int, flags: str = "", *, rows: int | None = 1, **more: Any) -> Step:
    """A request of a sequence; `flags` are some of `s` (start) and `e` (end)."""
    shape = [1] if rows is None else [rows, 1]
    parameters: Document = {} if sequence is None else {"sequence_id": sequence}
    parameters |= {"sequence_start": True} if "s" in flags else {}
    parameters |= {"sequence_end": True} if "e" in flags else {}
    inputs = [tensor("IN", "INT32", shape, [value] * (rows or 1))]
    return infer(MODEL, {"inputs": inputs} | ({"parameters": parameters | more} if parameters or more else {}))


def message(sequence: Document, value: int, flags: str = "") -> Document:
    """The same for gRPC; `sequence` is a parameter in protobuf's JSON form."""
    parameters: Document = {"sequence_id": sequence}
    parameters |= {"sequence_start": {"bool_param": True}} if "s" in flags else {}
    parameters |= {"sequence_end": {"bool_param": True}} if "e" in flags else {}
    given = {"name": "IN", "datatype": "INT32", "shape": ["1", "1"], "contents": {"int_contents": [value]}}
    return {"model_name": MODEL, "inputs": [given], "parameters": parameters}


GARBAGE = "Triton 2.51 gives the model the bytes of a pointer as the number, ours a digest of the text"
NO_TEXTS = "Triton 2.51 makes a control tensor of two strings, and refuses it"

SEVEN = {"int64_param": "7"}

CASES = [
    Case(
        "a sequence has its state from START to END",
        load(*ALL),
        get(f"/v2/models/{MODEL}"),
        get(f"/v2/models/{MODEL}/config"),
        send(7, 1, "s"),
        send(7, 2),
        send(7, 3, "e"),
        send(7, 4),
        send(7, 5, "s"),
        send(7, 6, "se"),
        send(8, 1, "se"),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "wrong requests",
        load(*ALL),
        send(None, 1),
        send(None, 1, "s"),
        send(0, 1, "s"),
        send(5, 1),
        send(5, 1, "e"),
        send(5, 1, "s", rows=2),
        send(5, 1, "s", rows=3),
        send(5, 1, "s", rows=None),
        send("text", 1, "se").differs(GARBAGE, body=...),
        send(2**64 - 1, 1, "se"),
        send(5, 1, "s", sequence_start="yes"),
        send(5, 1, "s", sequence_end=1),
        send(1.5, 1, "s"),  # type: ignore[arg-type]  # on purpose
        UNLOAD,
    ),
    Case(
        "a live sequence starts again",
        load(*ALL),
        send(7, 1, "s"),
        send(7, 2, "s"),
        send(7, 3),
        send(7, 0, "e"),
        UNLOAD,
    ),
    Case(
        "sequences side by side",
        load(*ALL, oldest={"max_candidate_sequences": 4}),
        send(1, 1, "s"),
        send(2, 10, "s"),
        send(1, 2),
        send(2, 20),
        send(1, 3, "e"),
        send(2, 30, "e"),
        UNLOAD,
    ),
    Case(
        "text as correlation id",
        load(START, END, control("CORRID", "CORRID", data_type="TYPE_STRING")),
        send("blue", 1, "s").differs(NO_TEXTS, status="http 200", body=..., error=None),
        send("blue", 2, "e").differs(NO_TEXTS, status="http 200", body=..., error=None),
        send(7, 1, "s").differs(NO_TEXTS, status="http 200", body=..., error=None),
        send("", 1, "s"),
        send("x" * 128, 1, "se").differs(NO_TEXTS, status="http 200", body=..., error=None),
        send("x" * 129, 1, "se"),
        UNLOAD,
    ),
    *(
        Case(
            f"correlation ids of type {datatype}",
            load(START, control("CORRID", "CORRID", data_type=f"TYPE_{datatype}")),
            send(7, 1, "se"),
            send(2**31, 1, "se"),
            send(2**33 + 5, 2, "se"),
            send("text", 1, "se").differs(GARBAGE, body=...),
            UNLOAD,
        )
        for datatype in ("INT32", "UINT32", "INT64")
    ),
    Case(
        "controls of other types",
        load(
            control("START", "START", fp32_false_true=[-1.0, 2.5]),
            control("END", "END", bool_false_true=[False, True]),
            control("READY", "READY", int32_false_true=[5, 6]),
        ),
        send(7, 1, "s"),
        send(7, 2),
        send(7, 3, "e"),
        UNLOAD,
    ),
    Case(
        "no controls at all",
        load(),
        send(7, 1, "s"),
        send(7, 2),
        send(7, 3, "e"),
        UNLOAD,
    ),
    Case(
        "a model without batching",
        load(*ALL, batch=0),
        send(7, 1, "s", rows=None),
        send(7, 2, rows=None),
        send(7, 2, "e", rows=None),
        send(7, 2, "s"),
        UNLOAD,
    ),
    Case(
        "a sequence that waits for a slot times out",
        load(*ALL, batch=1),
        send(1, 1, "s"),
        racing((0, send(2, 5, "s", timeout=200_000)), (900, send(1, 1, "e")), order=False),
        send(2, 1),
        send(2, 1, "se"),
        UNLOAD,
    ),
    Case(
        "an idle sequence ends",
        load(*ALL, max_sequence_idle_microseconds=200_000),
        send(7, 1, "s"),
        PAUSE,
        send(7, 2),
        send(7, 3, "s"),
        send(7, 4, "e"),
        UNLOAD,
    ),
    Case(
        "oldest",
        load(*ALL, oldest={"max_candidate_sequences": 2}),
        get(f"/v2/models/{MODEL}/config"),
        send(1, 1, "s"),
        send(2, 10, "s"),
        send(1, 2),
        send(2, 20, "e"),
        send(1, 3, "e"),
        send(3, 3),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "oldest with more sequences than candidates",
        load(*ALL, oldest={"max_candidate_sequences": 1}),
        send(1, 1, "s"),
        racing((0, send(2, 5, "s")), (200, send(1, 0, "e"))),
        send(2, 1, "e"),
        UNLOAD,
    ),
    Case(
        "oldest waits for a batch",
        load(*ALL, oldest={"max_candidate_sequences": 4, "max_queue_delay_microseconds": 300_000}),
        racing((0, send(1, 1, "s")), (100, send(2, 1, "s")), order=False),
        racing((0, send(1, 1, "e")), order=False),
        send(2, 1, "e"),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "requests of one sequence are executed in their order",
        load(*ALL),
        racing((0, send(1, -300, "s")), (100, send(1, -150)), (150, send(1, 7, "e"))),
        UNLOAD,
    ),
    Case(
        "a stream",
        load(*ALL),
        stream([message(SEVEN, 1, "s"), message(SEVEN, 2), message(SEVEN, 3, "e")]),
        stream([message(SEVEN, 1)]),
        rpc("ModelInfer", message({"string_param": "blue"}, 1, "se")).differs(GARBAGE, body=...),
        rpc("ModelInfer", message({"string_param": ""}, 1, "s")),
        rpc("ModelInfer", message({"int64_param": "-1"}, 1, "s")),
        rpc("ModelInfer", message({"bool_param": True}, 1, "s")),
        UNLOAD,
    ),
    Case(
        "an unloaded model",
        load(*ALL),
        send(7, 1, "se"),
        UNLOAD,
        send(8, 1, "s"),
        get(f"/v2/models/{MODEL}/ready"),
    ),
]

"""Inference with ensembles, over HTTP and gRPC, and the statistics of an ensemble and its models."""

from __future__ import annotations

import struct
from typing import Any

from bench.oracle.steps import Case, Document, Step, get, infer, rpc, stream, tensor

PAIR = [1, 2]


def pairs(model: str, *rows: list[int], name: str = "A", wanted: list[str] | None = None, **more: Any) -> Step:
    """A request whose rows are pairs; a single row without batching."""
    shape = [2] if len(rows) == 1 else [len(rows), 2]
    return shaped(model, shape, [value for row in rows for value in row], name=name, wanted=wanted, **more)


def shaped(
    model: str, shape: list[int], values: list[int], *, name: str = "A", wanted: list[str] | None = None, **more: Any
) -> Step:
    document: Document = {"inputs": [tensor(name, "INT32", shape, values)], **more}
    if wanted is not None:
        document["outputs"] = [{"name": each} for each in wanted]
    return infer(model, document)


def counted(model: str, *counts: int, name: str = "COUNT", **more: Any) -> Step:
    """Requests of one stream."""
    requests = [
        {"model_name": model, "id": f"r{number}", "inputs": [tensor(name, "INT32", [1])], **more}
        for number, _ in enumerate(counts)
    ]
    # Whether the last response is the final one or an empty one follows it depends on which model is faster.
    raw = [[struct.pack("<i", count)] for count in counts]
    return stream(requests, raw, ignore=("triton_final_response",))


def statistics(model: str) -> Step:
    return get(f"/v2/models/{model}/stats", ignore=("last_inference",))


def classes(model: str, shape: list[int]) -> Step:
    """Both classes of the output Z, with labels."""
    values = list(range(shape[-1] * (shape[0] if len(shape) > 1 else 1)))
    wanted = [{"name": "Z", "parameters": {"classification": 2}}]
    return infer(model, {"inputs": [tensor("A", "INT32", shape, values)], "outputs": wanted})


def words(content: bytes, count: int, **more: Any) -> Step:
    """A tensor of `count` strings, in the form of `content`."""
    given = tensor("TEXT", "BYTES", [count], binary_data_size=len(content))
    return infer("phrase", {"inputs": [given], **more}, content)


COUNTED_ONCE = "Triton counts a failed request to an ensemble twice"

CASES = [
    Case(
        "chains",
        shaped("chain", [1, 2], PAIR),
        shaped("chain", [3, 2], [1, 2, 3, 4, 5, 6], id="three"),
        shaped("chain", [5, 2], [1] * 10),
        shaped("chain", [2], PAIR),
        pairs("bridge", PAIR),
        pairs("bridge", PAIR, wanted=["Z"]),
        pairs("bridge", PAIR, wanted=["OUT"]),
        pairs("bridge", PAIR, name="IN"),
        shaped("bridge_rows", [3, 2], [1, 2, 3, 4, 5, 6]),
        shaped("bridge_rows", [5, 2], [1] * 10),
        shaped("bridge_rows", [5, 2], [1] * 10, id="five"),
        classes("chain", [1, 2]),
        classes("chain", [2, 2]),
        classes("bridge", [2]),
        classes("nested", [2]),
        pairs("branches", PAIR),
        pairs("branches", PAIR, wanted=["Y"]),
        pairs("branches", PAIR, wanted=["Z"]),
        pairs("nested", PAIR),
    ),
    Case(
        "what is handed down",
        pairs("tells", PAIR),
        pairs("tells", PAIR, id="seven", parameters={"timeout": 1000000, "priority": 3, "mine": "yes", "count": 4}),
        pairs("tells", PAIR, id="s", parameters={"sequence_id": 9, "sequence_start": True, "sequence_end": False}),
        pairs("tells", PAIR, id="s", parameters={"sequence_id": "name", "sequence_end": True}),
        rpc(
            "ModelInfer",
            {
                "model_name": "tells",
                "id": "g",
                "inputs": [tensor("A", "INT32", [2])],
                "parameters": {"mine": {"bool_param": True}, "sequence_id": {"int64_param": 12}},
            },
            [struct.pack("<2i", 1, 2)],
        ),
    ),
    Case(
        "errors of steps",
        shaped("chain", [1, 2], [-1, 0]),
        shaped("chain", [1, 2], [-1, 0], id="bad"),
        shaped("chain", [1, 2], [2000, 0], id="worse"),
        shaped("chain", [1, 2], [600, 0], id="late"),
        pairs("nested", [-1, 0], id="n"),
        pairs("nested", [-1, 0]),
        rpc(
            "ModelInfer",
            {"model_name": "chain", "id": "g", "inputs": [tensor("A", "INT32", [1, 2])]},
            [struct.pack("<2i", -1, 2)],
        ),
    ),
    Case(
        "wrong strings",
        words(b"\1\0\0\0a", 1),
        words(b"", 1),
        words(b"\1\0\0\0a", 2, id="few"),
        words(b"\1\0\0\0a\0\0\0\0", 1, id="many"),
        words(b"\1\0\0\0a\0\0", 2),
        words(b"\5\0\0\0a", 1, id="long"),
    ),
    Case(
        "optional tensors",
        infer("optional", {"inputs": [tensor("A", "INT32", [2], PAIR), tensor("M", "INT32", [2], [10, 20])]}),
        pairs("optional", PAIR),
        pairs("optional", PAIR, name="M"),
        pairs("optional", PAIR, wanted=["Y"]),
        pairs("partly", PAIR),
        pairs("partly", [7, 2]),
        pairs("partly", [7, 2], wanted=["Y"]),
        pairs("partly", [7, 2], wanted=["Z"]),
        pairs("partly", [8, 2], id="eight"),
        pairs("optional", [7, 2], id="seven"),
        pairs("optional", [7, 2], wanted=["Y"]),
    ),
    Case(
        "streams",
        counted("streams", 3),
        counted("streams", 0),
        counted("streams", 3, parameters={"triton_enable_empty_final_response": {"bool_param": True}}),
        counted("streams", 0, parameters={"triton_enable_empty_final_response": {"bool_param": True}}),
        counted("streams", -1),
        counted("streams", -1, parameters={"triton_enable_empty_final_response": {"bool_param": True}}),
        counted("streams", 2, outputs=[{"name": "NUMBER"}]),
        counted("streams", 2, outputs=[{"name": "TRIPLED"}]),
        counted("streams_double", 2),
        counted("streams_double", 101),
        counted("streams_twice", 3),
        counted("nested_streams", 3),
        shaped("streams", [1], [3], name="COUNT"),
        rpc("ModelInfer", {"model_name": "streams", "inputs": [tensor("COUNT", "INT32", [1])]}, [struct.pack("<i", 1)]),
        infer("streams", {"inputs": [tensor("A", "INT32", [1], [3])]}),
        stream(
            [{"model_name": "bridge", "id": "unary", "inputs": [tensor("A", "INT32", [2])]}],
            [[struct.pack("<2i", 1, 2)]],
        ),
    ),
    Case(
        "what is known of ensembles",
        get("/v2/models/chain"),
        get("/v2/models/chain/config"),
        get("/v2/models/chain/ready"),
        get("/v2/models/streams"),
        get("/v2/models/streams/config"),
        get("/v2/models/streams_twice/config"),
        get("/v2/models/nested_streams/config"),
        rpc("ModelConfig", {"name": "branches"}),
        rpc("ModelReady", {"name": "nested"}),
    ),
    Case(
        "statistics",
        statistics("chain").differs(COUNTED_ONCE, body=...),
        statistics("bridge_rows").differs(COUNTED_ONCE, body=...),
        statistics("nested").differs(COUNTED_ONCE, body=...),
        statistics("bridge").differs(COUNTED_ONCE, body=...),
        statistics("streams_twice"),
        statistics("partly"),
        statistics("triple"),
    ),
]

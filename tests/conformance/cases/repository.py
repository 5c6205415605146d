"""Repository control, and statistics after known traffic, over HTTP. Every case unloads what it loads."""

from __future__ import annotations

import base64
import json
from typing import Any

from bench.oracle.steps import ERROR, Case, Document, Step, get, infer, post, tensor

#: Models whose state tells which cases went before.
COMING_AND_GOING = (
    "late_broken",
    "late_chain",
    "late_completed",
    "late_configured",
    "late_counted",
    "late_doubled",
    "late_paced",
    "late_sequence",
)
LOAD = "/v2/repository/models/{}/load"
UNLOAD = "/v2/repository/models/{}/unload"


def index(body: Any, path: str = "/v2/repository/index") -> Step:
    return post(path, body, ignore=COMING_AND_GOING)


def load(model: str, parameters: Document | None = None) -> Step:
    return post(LOAD.format(model), {} if parameters is None else {"parameters": parameters})


def unload(model: str, parameters: Document | None = None) -> Step:
    return post(UNLOAD.format(model), {} if parameters is None else {"parameters": parameters})


def configured(*, instance_count: int, max_batch_size: int = 4) -> Document:
    """Parameters with the configuration of `late_counted`, but for these."""
    config = {
        "backend": "python",
        "max_batch_size": max_batch_size,
        "dynamic_batching": {},
        "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
        "instance_group": [{"kind": "KIND_CPU", "count": instance_count}],
    }
    return {"config": json.dumps(config)}


def counted(*values: int) -> Step:
    return infer("late_counted", {"inputs": [tensor("IN", "INT32", [len(values), 1], list(values))]})


STATISTICS = get("/v2/models/late_counted/stats", ignore=("last_inference",))

NEWER_CHECK = "newer Tritons check this"

CASES = [
    Case(
        "index",
        index({}),
        index({"ready": True}),
        index({"ready": False}),
        index(b""),
        index({"ready": "yes"}).differs(
            NEWER_CHECK, status="http 400", error="Invalid value for 'ready': expected a boolean"
        ),
        index({"ready": 1}).differs(
            NEWER_CHECK, status="http 400", error="Invalid value for 'ready': expected a boolean"
        ),
        index(b"["),
        index(b"[]"),
        index({"ready": None}).differs(
            NEWER_CHECK, status="http 400", error="Invalid value for 'ready': expected a boolean"
        ),
        index({"ready": True}, "/v2/repository/somewhere/index"),
    ),
    Case(
        "a model comes and goes",
        load("late_counted"),
        get("/v2/models/late_counted/ready"),
        load("late_counted"),
        unload("late_counted"),
        get("/v2/models/late_counted/ready"),
        get("/v2/models/late_counted"),
        counted(1),
        get("/v2/models/late_counted/versions/1/ready"),
        unload("late_counted"),
    ),
    Case(
        "models that cannot be loaded",
        load("no_such"),
        load("late_broken"),
        get("/v2/models/late_broken/ready"),
        load("..").differs(
            NEWER_CHECK, error="invalid model name '..', model name must not contain path traversal characters"
        ),
        load("%2e%2e"),
        load("late_counted/1"),
        unload("no_such"),
        unload("late_broken"),
    ),
    Case(
        "bodies of load requests",
        post(LOAD.format("late_counted"), b"{"),
        post(LOAD.format("late_counted"), b"[]"),
        post(LOAD.format("late_counted"), {"parameters": 5}),
        load("late_counted", {"nonsense": "x"}),
        load("late_counted", {"config": 5}),
        load("late_counted", {"config": None}),
        load("late_counted", {"config": "{"}),
        load("late_counted", {"config": "[]"}),
        load("late_counted", {"config": '{"nonsense": 1}'}),
        load("late_counted", {"config": '{"max_batch_size": "many"}'}),
        load("late_counted", {"config": ""}),
        unload("late_counted"),
        post("/v2/repository/somewhere/models/sum/load", {}),
        post("/v2/repository/somewhere/models/sum/unload", {}),
    ),
    Case(
        "bodies of unload requests",
        unload("no_such", {"unload_dependents": True}),
        unload("no_such", {"unload_dependents": "yes"}).differs(
            NEWER_CHECK,
            status="http 500",
            error="Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean",
            body=ERROR,
        ),
        unload("no_such", {"nonsense": 1}),
        post(UNLOAD.format("no_such"), b"{").differs(
            NEWER_CHECK,
            status="http 500",
            error="failed to parse the request JSON buffer: Missing a name for object member. at 1",
            body=ERROR,
        ),
        post(UNLOAD.format("no_such"), b""),
        post(UNLOAD.format("no_such"), {"parameters": []}),
    ),
    Case(
        "files in load requests",
        load("late_counted", {"file:1/model.py": base64.b64encode(b"x").decode()}),
        load("late_counted", {"file:1/model.py": 5}),
        load("late_counted", {"file:../x": "eA=="}),
        unload("late_counted"),
    ),
    Case(
        "a configuration completed by its model",
        load("late_completed"),
        get("/v2/models/late_completed/config"),
        get("/v2/models/late_completed"),
        infer("late_completed", {"inputs": [tensor("IN", "FP32", [1, 2], [1.5, 2])]}),
        unload("late_completed"),
    ),
    Case(
        "statistics of known traffic",
        load("late_counted"),
        STATISTICS,
        counted(1),
        counted(1, 2),
        counted(1, 2, 3),
        STATISTICS,
        infer("late_counted", {"inputs": [tensor("IN", "INT32", [9, 1], [1] * 9)]}),
        infer("late_counted", {"inputs": []}),
        STATISTICS,
        get("/v2/models/late_counted/versions/1/stats"),
        unload("late_counted"),
        STATISTICS,
        load("late_counted"),
        STATISTICS,
        unload("late_counted"),
    ),
    Case(
        "statistics of failures",
        load("late_counted"),
        counted(1, 2000),
        STATISTICS,
        counted(-1),
        counted(1, -2),
        STATISTICS.differs(
            "an answer that is an error counts as failed; for Triton's Python backend it is a success", body=...
        ),
        unload("late_counted"),
    ),
    Case(
        "instances of a model that serves",
        # Python leaves compiled files at the first load, for which Triton loads the version again at the next.
        load("late_counted"),
        unload("late_counted"),
        load("late_counted"),
        counted(1),
        load("late_counted", configured(instance_count=2)),
        STATISTICS,
        get("/v2/models/late_counted/config"),
        counted(2),
        STATISTICS,
        load("late_counted", configured(instance_count=1, max_batch_size=2)),
        STATISTICS,
        unload("late_counted"),
    ),
    Case(
        "statistics in order of their models",
        get(
            "/v2/models/stats",
            ignore=(
                "inference_stats",
                "inference_count",
                "execution_count",
                "last_inference",
                "batch_stats",
                "response_stats",
                "memory_usage",
            ),
        ),
    ),
]

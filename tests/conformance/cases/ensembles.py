"""Ensembles of a Python model: chains, branches, errors, what is handed down, statistics.

`late_doubled` is the step: it doubles its input, fails for 13, and tells what it got. `late_chain` is loaded with a
configuration of its own in each case.
"""

from __future__ import annotations

import json
from typing import Any

from bench.oracle.steps import Case, Document, Step, get, infer, post, rpc, tensor

MODEL = "late_chain"
CONFIG = get(f"/v2/models/{MODEL}/config")


def step(inputs: Document, outputs: Document, model: str = "late_doubled", version: int = -1) -> Document:
    return {"model_name": model, "model_version": version, "input_map": inputs, "output_map": outputs}


def load(
    *steps: Document, batch: int = 4, inputs: tuple[str, ...] = ("X",), outputs: tuple[str, ...] = ("Y",),
    texts: tuple[str, ...] = (), **more: Any,
) -> Step:  # fmt: skip
    """Load the ensemble with these steps."""
    config = {
        "platform": "ensemble",
        "max_batch_size": batch,
        "input": [{"name": name, "data_type": "TYPE_INT32", "dims": [1]} for name in inputs],
        "output": [{"name": name, "data_type": "TYPE_INT32", "dims": [1]} for name in outputs]
        + [{"name": name, "data_type": "TYPE_STRING", "dims": [1]} for name in texts],
        "ensemble_scheduling": {"step": list(steps)},
        **more,
    }
    return post(f"/v2/repository/models/{MODEL}/load", {"parameters": {"config": json.dumps(config)}})


LOAD_STEP = post("/v2/repository/models/late_doubled/load", {})
UNLOAD = post(f"/v2/repository/models/{MODEL}/unload", {})
UNLOAD_ALL = post(f"/v2/repository/models/{MODEL}/unload", {"parameters": {"unload_dependents": True}})
UNLOAD_STEP = post("/v2/repository/models/late_doubled/unload", {})


def ask(*values: int, name: str = "X", outputs: tuple[str, ...] = (), **more: Any) -> Step:
    request: Document = {"inputs": [tensor(name, "INT32", [len(values), 1], list(values))], **more}
    if outputs:
        request["outputs"] = [{"name": each} for each in outputs]
    return infer(MODEL, request)


ONE = step({"IN": "X"}, {"OUT": "Y"})
TWO = (step({"IN": "X"}, {"OUT": "mid"}), step({"IN": "mid"}, {"OUT": "Y"}))

CASES = [
    Case(
        "one step",
        LOAD_STEP,
        load(ONE),
        get(f"/v2/models/{MODEL}"),
        CONFIG,
        get(f"/v2/models/{MODEL}/ready"),
        ask(1),
        ask(1, 2, 3, 4),
        ask(1, 2, 3, 4, 5),
        ask(1, name="Z"),
        ask(1, outputs=("Y",)),
        ask(1, outputs=("nothing",)),
        ask(1, id="abc"),
        UNLOAD,
        UNLOAD_STEP,
    ),
    Case(
        "a chain",
        LOAD_STEP,
        load(*TWO),
        ask(1, 5),
        ask(1, 5),
        get(f"/v2/models/{MODEL}/stats"),
        get("/v2/models/late_doubled/stats"),
        UNLOAD,
        UNLOAD_STEP,
    ),
    Case(
        "branches",
        LOAD_STEP,
        load(
            step({"IN": "X"}, {"OUT": "a", "TOLD": "LEFT"}),
            step({"IN": "X"}, {"OUT": "b"}),
            step({"IN": "a"}, {"OUT": "Y"}),
            step({"IN": "b"}, {"OUT": "Z"}),
            outputs=("Y", "Z"),
            texts=("LEFT",),
        ),
        ask(3),
        ask(3, outputs=("Z",)),
        ask(3, outputs=("Y", "LEFT")),
        UNLOAD,
        UNLOAD_STEP,
    ),
    Case(
        "errors of a step",
        LOAD_STEP,
        load(*TWO),
        ask(13),
        ask(13, id="unlucky"),
        ask(1),
        rpc(
            "ModelInfer",
            {
                "model_name": MODEL,
                "inputs": [{"name": "X", "datatype": "INT32", "shape": ["1", "1"], "contents": {"int_contents": [13]}}],
            },
        ),
        get(f"/v2/models/{MODEL}/stats").differs("Triton counts a failed request to an ensemble twice", body=...),
        get("/v2/models/late_doubled/stats").differs(
            "a request to which a Python model responds with an error counts as a failure", body=...
        ),
        UNLOAD,
        UNLOAD_STEP,
    ),
    Case(
        "what is handed down",
        LOAD_STEP,
        load(step({"IN": "X"}, {"OUT": "Y", "TOLD": "TEXT"}), texts=("TEXT",)),
        ask(1, id="abc"),
        ask(1, parameters={"tenant": "blue", "level": 3}),
        ask(1, parameters={"sequence_id": 9, "sequence_start": True}),
        ask(1, parameters={"priority": 2, "timeout": 5_000_000}),
        UNLOAD,
        UNLOAD_STEP,
    ),
    Case(
        "an ensemble without batching over a step with it",
        LOAD_STEP,
        load(ONE, batch=0),
        infer(MODEL, {"inputs": [tensor("X", "INT32", [1], [3])]}),
        ask(3),
        UNLOAD,
        load(
            ONE,
            batch=0,
            input=[{"name": "X", "data_type": "TYPE_INT32", "dims": [-1, 1]}],
            output=[{"name": "Y", "data_type": "TYPE_INT32", "dims": [-1, 1]}],
        ),
        ask(3, 4),
        UNLOAD,
        UNLOAD_STEP,
    ),
    Case(
        "configurations that are refused",
        LOAD_STEP,
        load(step({"IN": "X"}, {"OUT": "Y"}, model="nothing")),
        load(step({"WRONG": "X"}, {"OUT": "Y"})),
        load(step({"IN": "X"}, {"WRONG": "Y"})),
        load(step({"IN": "X"}, {"OUT": "other"})),
        load(step({"IN": "other"}, {"OUT": "Y"})),
        load(step({"IN": "X"}, {"OUT": "Y"}), step({"IN": "X"}, {"OUT": "Y"})),
        load(),
        load(step({}, {"OUT": "Y"})),
        load(step({"IN": "X"}, {})),
        load(step({"IN": "X"}, {"OUT": "Y"}, model="")),
        load(step({"IN": "X"}, {"OUT": "Y"}, version=7)),
        load(ONE, batch=8),
        load(ONE, inputs=("X", "UNUSED")),
        load(ONE, instance_group=[{"count": 2}]),
        load(ONE, dynamic_batching={}),
        UNLOAD,
        UNLOAD_STEP,
    ),
    Case(
        "the step is not loaded",
        load(ONE),
        get("/v2/models/late_doubled/ready"),
        ask(2),
        UNLOAD_STEP,
        ask(2),
        get(f"/v2/models/{MODEL}/ready"),
        UNLOAD,
    ),
    Case(
        "an ensemble is unloaded with its steps",
        load(ONE),
        ask(2),
        UNLOAD_ALL,
        get(f"/v2/models/{MODEL}/ready"),
        get("/v2/models/late_doubled/ready"),
    ),
]

"""Ensembles in the model repository: their rules, their models that come and go, and who is loaded with whom."""

from __future__ import annotations

import json
from typing import Any

from bench.oracle.steps import Case, Document, Step, get, infer, post, tensor

LOAD = "/v2/repository/models/{}/load"
UNLOAD = "/v2/repository/models/{}/unload"


#: Models that may still be unloading when the index is asked for.
UNLOADING = ("late_part", "late_over", "late_over_over")


def index() -> Step:
    return post("/v2/repository/index", {}, ignore=UNLOADING)


def load(model: str, parameters: Document | None = None) -> Step:
    return post(LOAD.format(model), {} if parameters is None else {"parameters": parameters})


def unload(model: str, *, dependents: bool = False) -> Step:
    return post(UNLOAD.format(model), {"parameters": {"unload_dependents": True}} if dependents else {})


def ready(model: str, version: str = "") -> Step:
    return get(f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/ready")


def asked(model: str) -> Step:
    return infer(model, {"inputs": [tensor("A", "INT32", [2], [1, 2])]})


def io(name: str, dims: list[int], data_type: str = "TYPE_INT32", **more: Any) -> Document:
    return {"name": name, "data_type": data_type, "dims": dims, **more}


def step(model: str, inputs: dict[str, str], outputs: dict[str, str], version: int = -1) -> Document:
    return {"model_name": model, "model_version": version, "input_map": inputs, "output_map": outputs}


def part(input_name: str, **parameters: str) -> Step:
    """Load `late_part` with an input of this name."""
    config = {
        "backend": "python",
        "max_batch_size": 0,
        "input": [io(input_name, [2])],
        "output": [io("OUT", [2])],
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    return load("late_part", {"config": json.dumps(config)})


def ensemble(
    *steps: Document, inputs: list[Document] | None = None, outputs: list[Document] | None = None, batch: int = 0,
    **more: Any,
) -> Step:  # fmt: skip
    """Load `late_over` with this configuration."""
    config = {
        "platform": "ensemble",
        "max_batch_size": batch,
        "input": inputs or [io("A", [2])],
        "output": outputs or [io("Z", [2])],
        "ensemble_scheduling": {"step": list(steps), **more},
    }
    return load("late_over", {"config": json.dumps(config)})


TRIPLE = step("triple", {"IN": "A"}, {"OUT": "Z"})

INDEXED = "our index has the reason why an ensemble could not be loaded"

CASES = [
    Case("index", index()),
    Case(
        "rules about the models of steps",
        ensemble(step("triple", {"IN": "A"}, {"OUT": "b"}), step("double", {"IN": "b"}, {"OUT": "Z"}), batch=8),
        ensemble(step("triple", {"IN": "A"}, {"OUT": "Z"}), batch=2),
        ensemble(step("double", {"IN": "A"}, {"OUT": "Z"}), batch=8),
        ensemble(step("double", {"IN": "A"}, {"OUT": "Z"}), batch=2),
        ensemble(step("triple", {"OTHER": "A"}, {"OUT": "Z"})),
        ensemble(step("triple", {"IN": "A", "OTHER": "A"}, {"OUT": "Z"})),
        ensemble(step("triple", {"IN": "A"}, {"OTHER": "Z"})),
        ensemble(step("maybe", {"MORE": "A"}, {"OUT": "Z"})),
        ensemble(TRIPLE, inputs=[io("A", [2], "TYPE_FP32")]),
        ensemble(TRIPLE, outputs=[io("Z", [2], "TYPE_FP32")]),
        ensemble(TRIPLE, inputs=[io("A", [3])]),
        ensemble(TRIPLE, outputs=[io("Z", [2, 2])]),
        ensemble(TRIPLE, inputs=[io("A", [-1])]),
        ensemble(TRIPLE, inputs=[io("A", [-1, -1])]),
        ensemble(step("double", {"IN": "A"}, {"OUT": "Z"}), inputs=[io("A", [1, 2])]),
        ensemble(step("triple", {"IN": "A"}, {"OUT": "b"}), step("told", {"IN": "b"}, {"TOLD": "Z"})),
        ensemble(
            step("double", {"IN": "A"}, {"OUT": "b"}),
            step("told", {"IN": "b"}, {"TOLD": "Z"}),
            outputs=[io("Z", [1], "TYPE_STRING")],
        ),
        ensemble(step("nowhere", {"IN": "A"}, {"OUT": "Z"})),
        ensemble(step("nowhere", {"IN": "A"}, {"OUT": "b"}), step("neither", {"IN": "b"}, {"OUT": "Z"})),
        ensemble(step("versions", {"IN": "A"}, {"OUT": "Z"}, version=2)),
        ensemble(step("versions", {"IN": "A"}, {"OUT": "Z"}, version=0)),
        ensemble(step("late_over", {"A": "A"}, {"Z": "Z"})),
        ensemble(
            step("stream", {"COUNT": "A"}, {"PAIR": "p"}),
            step("stream", {"COUNT": "A"}, {"PAIR": "q"}),
            step("maybe", {"IN": "p", "MORE": "q"}, {"OUT": "Z"}),
            inputs=[io("A", [1])],
        ),
        ensemble(
            step("stream", {"COUNT": "A"}, {"PAIR": "p"}),
            step("maybe", {"IN": "p", "MORE": "B"}, {"OUT": "Z"}),
            inputs=[io("A", [1]), io("B", [2])],
        ),
        ensemble(
            step("stream", {"COUNT": "A"}, {"PAIR": "Z"}),
            step("triple", {"IN": "B"}, {"OUT": "Y"}),
            inputs=[io("A", [1]), io("B", [2])],
            outputs=[io("Z", [2]), io("Y", [2])],
        ),
        ensemble(),
        ensemble(TRIPLE, step("triple", {"IN": "A"}, {"OUT": "Z"})),
        unload("late_over"),
    ),
    Case(
        "loading loads the models of steps",
        load("late_over"),
        ready("late_part"),
        ready("late_over"),
        asked("late_over"),
        unload("late_over"),
        ready("late_part"),
        ready("late_over"),
        asked("late_over"),
        load("late_over_over"),
        index(),
        asked("late_over_over"),
        unload("late_over_over", dependents=True),
        index(),
        unload("late_part"),
        index(),
    ),
    Case(
        "a model of a step goes and comes",
        load("late_over_over"),
        unload("late_part"),
        ready("late_over"),
        ready("late_over_over"),
        asked("late_over"),
        asked("late_over_over"),
        index(),
        load("late_part"),
        ready("late_over"),
        ready("late_over_over"),
        asked("late_over_over"),
        unload("late_over_over", dependents=True),
        index(),
        unload("late_part"),
        unload("late_over"),
        index(),
    ),
    Case(
        "models of steps that cannot be loaded",
        load("late_over_broken"),
        ready("late_over_broken"),
        asked("late_over_broken").differs(
            INDEXED, error="Request for unknown model: 'late_over_broken' has no available versions"
        ),
        load("late_over_missing"),
        asked("late_over_missing").differs(
            INDEXED, error="Request for unknown model: 'late_over_missing' has no available versions"
        ),
        load("late_over_version"),
        load("late_circle"),
        load("late_circle_other").differs(
            "Triton finds the circle only with the first of its ensembles",
            status="http 400",
            error="load failed for model 'late_circle_other': circular dependency between ensembles: "
            "late_circle_other -> ... -> late_circle -> late_circle_other\n",
        ),
        index().differs(INDEXED, body=...),
        unload("late_over_broken"),
        unload("late_over_missing"),
        unload("late_over_version"),
        unload("late_circle"),
        unload("late_circle_other"),
        index(),
    ),
    Case(
        "a model of a step is loaded again",
        load("late_over"),
        asked("late_over"),
        part("IN", again="yes"),
        asked("late_over"),
        get("/v2/models/late_over/stats", ignore=("last_inference",)),
        part("OTHER"),
        ready("late_over"),
        asked("late_over"),
        index(),
        load("late_part"),
        ready("late_over"),
        asked("late_over"),
        part("IN"),
        ready("late_over"),
        asked("late_over"),
        unload("late_over", dependents=True),
        unload("late_part"),
        index(),
    ),
]

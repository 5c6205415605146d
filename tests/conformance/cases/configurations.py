"""Configurations that a load request brings: what /config makes of them, and which are refused."""

from __future__ import annotations

import json
from typing import Any

from bench.oracle.steps import Case, Document, Step, get, post

MODEL = "late_configured"
LOAD = f"/v2/repository/models/{MODEL}/load"


def tensors(kind: str, **more: Any) -> list[Document]:
    return [{"name": "IN" if kind == "input" else "OUT", "data_type": "TYPE_INT32", "dims": [1], **more}]


def load(**more: Any) -> Step:
    """Load the model with a configuration of these members beside the ones that it needs."""
    config = {
        "backend": "python",
        "input": tensors("input"),
        "output": tensors("output"),
        "instance_group": [{"kind": "KIND_CPU"}],
        **more,
    }
    return post(LOAD, {"parameters": {"config": json.dumps(config)}})


UNLOAD = post(f"/v2/repository/models/{MODEL}/unload", {})


def shown(name: str, **more: Any) -> Case:
    """A configuration that is taken, as the server then shows it."""
    return Case(name, load(**more), get(f"/v2/models/{MODEL}/config"), get(f"/v2/models/{MODEL}"), UNLOAD)


def refused(name: str, *configs: Document) -> Case:
    """Configurations that are not taken; the model stays unloaded."""
    return Case(name, *(load(**config) for config in configs), get(f"/v2/models/{MODEL}/ready"), UNLOAD)


def initial_state(**more: Any) -> Document:
    """A configuration whose state has this initial value."""
    initial = {"name": "begin", "data_type": "TYPE_INT32", "dims": [1], **more}
    state = {"input_name": "BEFORE", "output_name": "AFTER", "data_type": "TYPE_INT32", "dims": [1]}
    return {"sequence_batching": {"state": [{**state, "initial_state": [initial]}]}}


NEWER_FIELD = "model_metrics came after the recorded Triton, which takes it for a mistake"
HISTOGRAM = {
    "metric_control": [
        {
            "metric_identifier": {"family": "nv_inference_first_response_histogram_ms"},
            "histogram_options": {"buckets": [1, 10.5, 100]},
        }
    ]
}
READY = get("/v2/health/ready")

CASES = [
    # First of all: a model that has failed to load, which other cases leave behind, is not ready. Nor is one that is
    # being unloaded, but for how long is left to chance.
    Case("readiness", READY, load(max_batch_size=-1), READY, load(), READY, UNLOAD),
    shown("nothing more"),
    shown(
        "dynamic batching",
        max_batch_size=8,
        dynamic_batching={
            "preferred_batch_size": [4, 8],
            "max_queue_delay_microseconds": 100,
            "preserve_ordering": True,
        },
    ),
    shown(
        "queue policies",
        max_batch_size=4,
        dynamic_batching={
            "priority_levels": 3,
            "default_priority_level": 2,
            "default_queue_policy": {"timeout_action": "DELAY", "default_timeout_microseconds": 5, "max_queue_size": 9},
            "priority_queue_policy": {"1": {"allow_timeout_override": True}, "3": {"max_queue_size": 1}},
        },
    ),
    shown(
        "tensors",
        max_batch_size=2,
        input=[
            *tensors("input", dims=[-1, 3], reshape={"shape": [-1, 1, 3]}, optional=True),
            {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [2], "allow_ragged_batch": False},
        ],
        output=[
            *tensors("output", dims=[1], reshape={"shape": []}, label_filename=""),
            {"name": "BF", "data_type": "TYPE_BF16", "dims": [4]},
        ],
    ),
    shown(
        "instances and tags",
        instance_group=[{"name": "first", "kind": "KIND_CPU", "count": 2}],
        metric_tags={"team": "blue", "a": "b"},
        parameters={"key": {"string_value": "value"}},
    ),
    shown("versions and files", version_policy={"specific": {"versions": [1]}}, default_model_filename="model.py"),
    shown("all versions", version_policy={"all": {}}),
    shown(
        "optimization",
        optimization={
            "priority": "PRIORITY_MAX",
            "graph": {"level": 1},
            "eager_batching": True,
            "input_pinned_memory": {"enable": False},
            "gather_kernel_buffer_threshold": 5,
            "execution_accelerators": {"cpu_execution_accelerator": [{"name": "openvino", "parameters": {"a": "b"}}]},
        },
    ),
    shown("decoupled and cached", model_transaction_policy={"decoupled": True}),
    shown("an empty version policy", version_policy={}),
    shown(
        "texts for bools",
        input=tensors("input", optional="true", allow_ragged_batch="no"),
        response_cache={"enable": "0"},
        instance_group=[{"kind": "KIND_CPU", "passive": "False"}],
    ),
    shown("numbers as strings", max_batch_size="4", input=tensors("input", dims=["1"])),
    Case(
        "metrics",
        load(model_metrics=HISTOGRAM).differs(NEWER_FIELD, status="http 200", error=None, body=...),
        get(f"/v2/models/{MODEL}/config").differs(NEWER_FIELD, status="http 200", error=None, body=...),
        get(f"/v2/models/{MODEL}/ready").differs(NEWER_FIELD, status="http 200", error=None, body=...),
        UNLOAD,
    ),
    refused(
        "sizes",
        {"max_batch_size": -1},
        {"max_batch_size": 2**31},
        {"max_batch_size": 4, "dynamic_batching": {"preferred_batch_size": [5]}},
        {"max_batch_size": 4, "dynamic_batching": {"preferred_batch_size": [0]}},
        {"max_batch_size": 4, "dynamic_batching": {"priority_levels": 2}},
    ),
    refused(
        "tensors without something",
        {"input": [{"data_type": "TYPE_INT32", "dims": [1]}]},
        {"input": [{"name": "IN", "dims": [1]}]},
        {"input": tensors("input", dims=[])},
        {"input": tensors("input", dims=[0])},
        {"input": tensors("input", dims=[-2])},
        {"output": tensors("output", dims=[0])},
        {"input": tensors("input", data_type="TYPE_INT33")},
        {"input": tensors("input", reshape={"shape": []})},
        {"input": tensors("input", format="FORMAT_NCHW")},
        {"input": tensors("input", is_shape_tensor=True)},
    ),
    refused(
        "backends",
        {"backend": "no_such"},
        {"backend": "python", "platform": "onnxruntime_onnx"},
        {"backend": "python", "platform": "ensemble"},
        {"name": "another_name"},
    ),
    refused(
        "instances",
        {"instance_group": [{"kind": "KIND_CPU", "gpus": [0]}]},
        {"instance_group": [{"kind": "KIND_GPU"}]},
        {"instance_group": [{"kind": "KIND_MODEL", "gpus": [0]}]},
    ),
    refused("kinds of instances that have no name", {"instance_group": [{"kind": 9}]}),
    refused(
        "batch inputs and outputs",
        {"batch_input": [{"target_name": ["N"], "data_type": "TYPE_INT32"}]},
        {"batch_input": [{"target_name": ["N"], "data_type": "TYPE_INT64", "source_input": ["IN"]}]},
        {"batch_input": [{"target_name": ["N"], "data_type": "TYPE_INT32", "source_input": ["NO"]}]},
        {"batch_output": [{"target_name": ["OUT"]}]},
        {"batch_output": [{"target_name": ["OUT"], "source_input": ["NO"]}]},
        {"batch_output": [{"target_name": ["NO"], "source_input": ["IN"]}]},
    ),
    refused("a reshape without a datatype", {"input": [{"name": "IN", "dims": [1], "reshape": {"shape": [1]}}]}),
    refused(
        "initial values of states",
        initial_state(zero_data=True, data_type="TYPE_FP32"),
        initial_state(zero_data=True, dims=[1, 1]),
        initial_state(zero_data=True, dims=[-1]),
        initial_state(zero_data=True, name=""),
        initial_state(),
    ),
    refused("versions that are not there", {"version_policy": {"specific": {"versions": [7]}}}),
    refused("two schedulers", {"dynamic_batching": {}, "sequence_batching": {}}),
]

"""What happens in time: queues, limits, timeouts, priorities, batches that wait, models that come and go under load.

Every case loads `late_paced` with a configuration of its own, and unloads it. Its requests take as many milliseconds as
they ask for. Times that count differ by 100 ms or more.
"""

from __future__ import annotations

import json
from typing import Any

from bench.oracle.steps import Case, Document, Step, get, infer, post, racing, rpc, tensor

MODEL = "late_paced"
STATISTICS = get(f"/v2/models/{MODEL}/stats")
READY = get(f"/v2/models/{MODEL}/ready")


def load(*, batch: int = 0, instances: int = 1, dynamic: Document | None = None) -> Step:
    """Load the model with this configuration."""
    config: Document = {
        "backend": "python",
        "max_batch_size": batch,
        "instance_group": [{"kind": "KIND_CPU", "count": instances}],
        "input": [{"name": name, "data_type": "TYPE_INT32", "dims": [1]} for name in ("IN", "WAIT")],
        "output": [{"name": name, "data_type": "TYPE_INT32", "dims": [1]} for name in ("OUT", "ROWS")],
    }
    if dynamic is not None:
        config["dynamic_batching"] = dynamic
    return post(f"/v2/repository/models/{MODEL}/load", {"parameters": {"config": json.dumps(config)}})


UNLOAD = post(f"/v2/repository/models/{MODEL}/unload", {})


def alone(value: int, wait_ms: int = 0, **parameters: Any) -> Step:
    """A request to a model without batching."""
    inputs = [tensor("IN", "INT32", [1], [value]), tensor("WAIT", "INT32", [1], [wait_ms])]
    return infer(MODEL, {"id": str(value), "inputs": inputs} | ({"parameters": parameters} if parameters else {}))


def rows(*values: int, wait_ms: int = 0, **parameters: Any) -> Step:
    """A request with a row for each value."""
    shape = [len(values), 1]
    inputs = [tensor("IN", "INT32", shape, list(values)), tensor("WAIT", "INT32", shape, [wait_ms] * len(values))]
    return infer(MODEL, {"id": str(values[0]), "inputs": inputs} | ({"parameters": parameters} if parameters else {}))


def grpc_rows(value: int, wait_ms: int = 0, *, deadline_s: float = 10, **parameters: Document) -> Step:
    """The same over gRPC, with a deadline in seconds."""

    def given(name: str, number: int) -> Document:
        return {"name": name, "datatype": "INT32", "shape": ["1", "1"], "contents": {"int_contents": [number]}}

    request: Document = {"model_name": MODEL, "id": str(value), "inputs": [given("IN", value), given("WAIT", wait_ms)]}
    if parameters:
        request["parameters"] = parameters
    return rpc("ModelInfer", request, timeout=deadline_s)


def policy(**values: Any) -> Document:
    return {"default_queue_policy": values}


REJECT = policy(timeout_action="REJECT", default_timeout_microseconds=250_000, allow_timeout_override=True)
DELAY = policy(timeout_action="DELAY", default_timeout_microseconds=200_000)

CASES = [
    Case(
        "one instance executes one request after the other",
        load(),
        READY,
        racing((0, alone(1, 200)), (50, alone(2, 150)), (100, alone(3))),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "two instances execute two requests at a time",
        load(instances=2),
        racing((0, alone(1, 400)), (50, alone(2, 100)), (75, alone(3, 100))),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "a batching model without a batcher executes each request alone",
        load(batch=4),
        racing((0, rows(1, wait_ms=200)), (50, rows(2, 3)), (50, rows(4)), order=False),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "requests that wait become a batch",
        load(batch=4, dynamic={}),
        racing((0, rows(1, wait_ms=300)), (80, rows(2)), (110, rows(3)), (140, rows(4)), order=False),
        STATISTICS,
        racing((0, rows(1, wait_ms=300)), *((80 + 30 * n, rows(2 + n)) for n in range(5)), order=False),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "requests of several rows",
        load(batch=4, dynamic={}),
        racing((0, rows(1, wait_ms=300)), (80, rows(2, 3, 4)), (120, rows(5, 6)), (160, rows(7, 8)), order=False),
        STATISTICS,
        rows(1, 2, 3, 4),
        rows(1, 2, 3, 4, 5),
        UNLOAD,
    ),
    Case(
        "a delay waits for a full batch",
        load(batch=4, dynamic={"max_queue_delay_microseconds": 300_000}),
        racing((0, rows(1)), (50, rows(2)), (100, rows(3)), order=False),
        racing((0, rows(1)), (50, rows(2)), (100, rows(3, 4)), order=False),
        racing((0, rows(1, 2, 3, 4)), order=False),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "a preferred size does not wait",
        load(batch=8, dynamic={"preferred_batch_size": [2, 4], "max_queue_delay_microseconds": 400_000}),
        racing((0, rows(1)), (100, rows(2)), order=False),
        racing((0, rows(1, 2, 3)), (100, rows(4)), order=False),
        racing((0, rows(1, 2, 3, 4, 5)), order=False),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "a full queue refuses",
        load(batch=1, dynamic=policy(max_queue_size=2)),
        racing(
            (0, rows(1, wait_ms=500)), (100, rows(2)), (150, rows(3)), (200, rows(4)), (250, grpc_rows(5)), order=False
        ),
        STATISTICS,
        rows(6),
        UNLOAD,
    ),
    Case(
        "a full queue of one level refuses only that level",
        load(
            batch=1,
            dynamic={
                "priority_levels": 2,
                "default_priority_level": 2,
                "priority_queue_policy": {"1": {"max_queue_size": 1}, "2": {"max_queue_size": 2}},
            },
        ),
        racing(
            (0, rows(1, wait_ms=600)),
            (100, rows(2)),
            (140, rows(3)),
            (180, rows(4)),
            (220, rows(5, priority=1)),
            (260, rows(6, priority=1)),
            (300, rows(7, priority=2)),
            order=False,
        ),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "requests expire",
        load(batch=1, dynamic=REJECT),
        racing((0, rows(1, wait_ms=700)), (50, rows(2)), (100, grpc_rows(3)), order=False),
        STATISTICS,
        racing((0, rows(1, wait_ms=200)), (50, rows(2)), order=False),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "requests bring shorter timeouts, not longer ones",
        load(batch=1, dynamic=REJECT),
        racing((0, rows(1, wait_ms=200)), (50, rows(2, timeout=50_000)), order=False),
        racing((0, rows(1, wait_ms=700)), (50, rows(2, timeout=5_000_000)), order=False),
        racing((0, rows(1, wait_ms=150)), (50, rows(2, timeout=0)), order=False),
        racing((0, rows(1, wait_ms=200)), (50, grpc_rows(2, timeout={"int64_param": "50000"})), order=False),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "a timeout has no effect where it is not allowed or there is no default",
        load(batch=1, dynamic=policy(default_timeout_microseconds=2_000_000)),
        racing((0, rows(1, wait_ms=300)), (50, rows(2, timeout=50_000)), order=False),
        load(batch=1, dynamic=policy(allow_timeout_override=True)),
        racing((0, rows(1, wait_ms=300)), (50, rows(2, timeout=50_000)), order=False),
        load(batch=1),
        racing((0, rows(1, wait_ms=300)), (50, rows(2, timeout=50_000)), order=False),
        UNLOAD,
    ),
    Case(
        "expired requests wait behind the others",
        load(batch=1, dynamic=DELAY),
        racing((0, rows(1, wait_ms=500)), (50, rows(2, wait_ms=150)), (400, rows(3, wait_ms=150))),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "priorities",
        load(batch=1, dynamic={"priority_levels": 3, "default_priority_level": 2}),
        racing(
            (0, rows(1, wait_ms=400)),
            (100, rows(2, wait_ms=120, priority=3)),
            (150, rows(3, wait_ms=120)),
            (200, rows(4, wait_ms=120, priority=1)),
        ),
        racing(
            (0, rows(1, wait_ms=400)),
            (100, rows(2, wait_ms=120, priority=9)),
            (150, rows(3, wait_ms=120, priority=2)),
            (200, rows(4, wait_ms=120, priority=1)),
        ),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "a priority means nothing to a model without levels",
        load(batch=1, dynamic={}),
        racing((0, rows(1, wait_ms=300)), (100, rows(2, wait_ms=120, priority=3)), (200, rows(3, priority=1))),
        rows(4, priority=-1),
        rows(5, priority="high"),
        rows(6, priority=1.5),
        rows(7, timeout=-1),
        rows(8, timeout="soon"),
        UNLOAD,
    ),
    Case(
        "levels with policies of their own",
        load(
            batch=1,
            dynamic={
                "priority_levels": 2,
                "default_priority_level": 1,
                "priority_queue_policy": {
                    "2": {"timeout_action": "REJECT", "default_timeout_microseconds": 150_000, "max_queue_size": 1}
                },
            },
        ),
        racing(
            (0, rows(1, wait_ms=700)),
            (50, rows(2)),
            (100, rows(3, priority=2)),
            (150, rows(4, priority=2)),
            order=False,
        ),
        STATISTICS,
        UNLOAD,
    ),
    Case(
        "a deadline of the client ends the wait",
        load(batch=1, dynamic={}),
        racing(
            (0, grpc_rows(1, 500)),
            (100, grpc_rows(2, deadline_s=0.15)),
            (150, grpc_rows(3)),
            order=False,
            ignore=("error",),  # who says it first, the client or the server
        ),
        READY,
        UNLOAD,
    ),
    Case(
        "responses keep the order of requests",
        load(batch=1, instances=2, dynamic={"preserve_ordering": True}),
        racing((0, rows(1, wait_ms=400)), (100, rows(2, wait_ms=50))),
        STATISTICS,
        load(batch=1, instances=2, dynamic={}),
        racing((0, rows(1, wait_ms=400)), (100, rows(2, wait_ms=50))),
        UNLOAD,
    ),
    Case(
        "an unloaded model finishes its requests",
        load(),
        racing((0, alone(1, 500)), (150, UNLOAD), (300, alone(2)), (350, READY), order=False),
        get("/v2/models/late_paced"),
        alone(3),
    ),
    Case(
        "a model that is loaded again finishes its requests",
        load(),
        racing((0, alone(1, 900)), (100, load(instances=2)), order=False),
        racing((0, alone(1, 400)), (0, alone(2, 400))),
        UNLOAD,
    ),
    Case(
        "a request waits while another model is busy",
        load(),
        racing(
            (0, alone(1, 400)),
            (
                100,
                infer(
                    "rows",
                    {"inputs": [tensor("IN", "INT32", [1, 3], [1, 2, 3]), tensor("FREE", "INT32", [1, 1, 2], [1, 2])]},
                ),
            ),
            (100, get("/v2/health/ready")),
        ),
        UNLOAD,
    ),
]

"""Calls between models: what the model `caller` gets back from others, by `exec`, in threads, and by `async_exec`."""

from __future__ import annotations

import json
import struct
from typing import Any

from bench.oracle.steps import Case, Step, get, infer, post, stream, tensor

A, B = [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]
PAIR: list[Any] = [["INPUT0", "FP32", [4], A], ["INPUT1", "FP32", [4], B]]
BOTH = ["OUTPUT0", "OUTPUT1"]
FLAG_START, FLAG_END = 1, 2
ONE: list[Any] = [["IN", "INT32", [1], [7]]]

Call = dict[str, Any]


def asked(model: str, how: str, *calls: Call) -> Step:
    """One request to `caller` or `async_caller`, which makes these calls."""
    plan = json.dumps({"how": how, "calls": calls}, sort_keys=True)
    return infer(model, {"inputs": [tensor("PLAN", "BYTES", [1], [plan])]})


def each_way(name: str, *calls: Call) -> Case:
    """The calls one after the other, in a thread each, and awaited: three steps."""
    return Case(
        name,
        asked("caller", "sync", *calls),
        asked("caller", "threads", *calls),
        asked("async_caller", "sync", *calls),
        asked("async_caller", "gather", *calls),
    )


def call(model: str, inputs: list[Any], outputs: list[str] | None = None, **more: Any) -> Call:
    return {"model": model, "inputs": inputs, "outputs": outputs or [], **more}


def add(**more: Any) -> Call:
    return call("add_sub", PAIR, BOTH, **more)


def seen(**more: Any) -> Call:
    return call("seen", ONE, ["OUT"], **more)


def count(number: int, **more: Any) -> Call:
    return call("count", [["N", "INT32", [1], [number]]], ["OUT"], **more)


def failing(kind: str, **more: Any) -> Call:
    return call("fail", [["KIND", "BYTES", [1], [kind]]], ["OUT"], **more)


def refused(name: str, *calls: tuple[Call, str]) -> Case:
    """Calls that are refused with these errors, each way."""
    found = [{"error": f"Model {each['model']} - Error when running inference: {text}"} for each, text in calls]
    steps = each_way(name, *(each for each, _ in calls)).steps
    models = ("caller", "caller", "async_caller", "async_caller")
    ours = [shown(*found, model=model) for model in models]
    return Case(name, *(step.differs(UNKNOWN, body=body) for step, body in zip(steps, ours, strict=True)))


def shown(*found: Any, model: str = "caller") -> dict[str, Any]:
    """Our response with what the calls have returned."""
    outputs = [{"name": "OUT", "datatype": "BYTES", "shape": [1], "data": [json.dumps(found, sort_keys=True)]}]
    return {
        "content-type": "application/json",
        "json": {"model_name": model, "model_version": "1", "outputs": outputs},
    }


def one(value: int) -> Any:
    """What is shown of a response of `count`."""
    return {"outputs": {"OUT": ["int32", [1], [value]]}}


def controlled(kind: str, *arguments: Any, **more: Any) -> Call:
    return {"control": kind, "arguments": arguments, **more}


def sequence(value: int, flags: int = 0, number: int | str = 5) -> Call:
    return call("running", [["IN", "INT32", [1], [value]]], ["OUT"], correlation_id=number, flags=flags)


def floats(model: str, **more: Any) -> Step:
    inputs = [tensor(*each) for each in PAIR]
    if "name" in more:
        inputs.append(tensor("MODEL_NAME", "BYTES", [1], [more["name"]]))
    return infer(model, {"inputs": inputs})


def number(model: str, value: int) -> Step:
    return infer(model, {"inputs": [tensor("IN", "INT32", [1], [value])]})


def passed_on(value: int) -> Step:
    request = {"model_name": "bls_stream", "id": "s", "inputs": [tensor("IN", "INT32", [1])]}
    return stream([request], [[struct.pack("<i", value)]])


NOTHING = "Model nothing - Error when running inference: Request for unknown model: 'nothing' is not found"
LATER = "Triton 2.51 gives all errors the code INTERNAL. Later versions keep the code"
UNKNOWN = "Triton 2.51 says that an unknown model is not ready. Later versions say that it is unknown"
LOST = "Triton 2.51 loses errors between the responses of a stream"

CODES = ("OK", "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS",
         "CANCELLED", "RAISE")  # fmt: skip

TYPES: dict[str, list[Any]] = {
    "BOOL": [True, False], "INT8": [-1, 7], "INT16": [-300, 7], "INT32": [-70000, 7], "INT64": [-(2**40), 7],
    "UINT8": [0, 255], "UINT16": [0, 65535], "UINT32": [0, 2**32 - 1], "UINT64": [0, 2**63], "FP16": [0.5, -1.25],
    "FP32": [0.5, -1.25], "FP64": [0.1, 1e300],
}  # fmt: skip

CASES = [
    Case(
        "models that are ready",
        asked(
            "caller",
            "sync",
            controlled("ready", "add_sub"),
            controlled("ready", "add_sub", "1"),
            controlled("ready", "add_sub", "2"),
            controlled("ready", "nothing"),
            controlled("ready", "late_pair"),
            controlled("ready", "versions", "x"),
            controlled("ready", "twice"),
        ),
    ),
    Case(
        "the examples of the documentation",
        floats("bls_sync", name="add_sub"),
        floats("bls_sync", name="nothing").differs(
            UNKNOWN,
            error="Failed to process the request(s) for model 'bls_sync_0', message: TritonModelException: Model "
            "nothing - Error when running inference: Request for unknown model: 'nothing' is not found\n\nAt:\n"
            "  bls_sync/1/model.py(17): execute\n",
        ),
        floats("bls_sync", name="fail"),
        floats("bls_async"),
        number("bls_decoupled_sync", 5),
        number("bls_decoupled_sync", 0),
        number("bls_decoupled_sync", -5),
        number("bls_decoupled_async", 5),
        number("bls_decoupled_async", -100),
    ),
    Case("a stream that is passed on", *(passed_on(value) for value in (3, 0, -2))),
    Case("an error within a stream that is passed on", passed_on(1003).differs(LOST, body=..., error="not this one")),
    each_way("one call", add()),
    each_way("calls one after the other", add(), add(), call("versions", ONE, ["OUT"])),
    each_way(
        "outputs that are asked for", *(call("add_sub", PAIR, outputs) for outputs in ([], ["OUTPUT1"], BOTH[::-1]))
    ),
    each_way("versions", *(call("versions", ONE, ["OUT"], version=version) for version in (-1, 1, 2, 3))),
    refused(
        "versions that are not there",
        *(
            (call("versions", ONE, ["OUT"], version=version), text)
            for version, text in (
                (0, "Request for unknown model: 'versions' version 0 is not found"),
                (9, "Request for unknown model: 'versions' version 9 is not found"),
                (-2, "invalid model version specified '-2' , version should be an integral value > 0"),
            )
        ),
    ),
    refused(
        "models that are not there",
        *(
            (call(name, inputs), f"Request for unknown model: '{name}' is not found")
            for name, inputs in (("nothing", ONE), ("late_pair", PAIR), ("", ONE))
        ),
    ),
    *(each_way(f"the error {code}", failing(code)) for code in CODES),
    each_way("all errors", *(failing(code) for code in CODES)),
    Case(
        "codes of errors",
        *(
            asked("caller", "sync", failing(code, codes=True)).differs(
                LATER, body=shown({"code": code, "error": f"failed: {code}"})
            )
            for code in CODES
            if code not in ("OK", "INTERNAL", "RAISE")
        ),
        asked(
            "caller",
            "sync",
            failing("INTERNAL", codes=True),
            failing("RAISE", codes=True),
            call("nothing", [], codes=True),
        ).differs(
            UNKNOWN,
            body=shown(
                {"code": "INTERNAL", "error": "failed: INTERNAL"},
                {
                    "code": "INTERNAL",
                    "error": "Failed to process the request(s) for model 'fail_0', message: ValueError: the model "
                    "raises\n\nAt:\n  fail/1/model.py(13): execute\n",
                },
                {"code": "INTERNAL", "error": NOTHING},
            ),
        ),
        asked("caller", "sync", call("add_sub", [], codes=True)),
    ),
    each_way("what the model sees", seen()),
    each_way(
        "what the model sees of the request's own fields",
        seen(request_id="a request"),
        seen(timeout=5_000_000),
        seen(parameters={"text": "søn", "number": -3, "large": 2**40, "yes": True}),
        seen(correlation_id=7, flags=FLAG_START | FLAG_END),
        call("seen", ONE, ["OTHER", "OUT"]),
    ),
    each_way("an input too few", call("add_sub", PAIR[:1], BOTH)),
    each_way("an input too many", call("add_sub", [*PAIR, ["INPUT2", "FP32", [4], A]], BOTH)),
    each_way("no input", call("add_sub", [], BOTH)),
    each_way("an input twice", call("versions", ONE + ONE, ["OUT"])),
    each_way("a wrong datatype", call("add_sub", [["INPUT0", "INT32", [4], [1, 2, 3, 4]], PAIR[1]], BOTH)),
    each_way("a wrong shape", call("add_sub", [["INPUT0", "FP32", [2, 2], A], PAIR[1]], BOTH, request_id="x")),
    each_way("an output that is not there", call("add_sub", PAIR, ["NONE"])),
    each_way(
        "batches",
        call("rows", [["IN", "FP32", [1, 2], [1, 2]]], ["OUT"]),
        call("rows", [["IN", "FP32", [4, 2], list(range(8))]], ["OUT"]),
        call("rows", [["IN", "FP32", [5, 2], list(range(10))]], ["OUT"]),
        call("rows", [["IN", "FP32", [2], [1, 2]]], ["OUT"]),
    ),
    *(
        each_way(f"tensors of {kind}", call("types", [[f"IN_{kind}", kind, [2], values]], [f"OUT_{kind}"]))
        for kind, values in TYPES.items()
    ),
    each_way("texts", call("types", [["IN_STRING", "BYTES", [3], ["", "søn", "x" * 300]]], ["OUT_STRING"])),
    each_way("tensors without elements", call("types", [["IN_FP32", "FP32", [0], []]], ["OUT_FP32"])),
    each_way("large tensors", call("types", [["IN_INT32", "INT32", [3000], list(range(3000))]], ["OUT_INT32"])),
    each_way("memory that is preferred", add(preferred="CPU")),
    each_way("a trace that is passed on", add(trace=True)),
    Case(
        "an ensemble",
        asked("caller", "sync", call("twice", [["A", "FP32", [4], A]], ["B"])).differs(
            "Responses have parameters in Triton since 2025-01",
            body=shown(
                {
                    "outputs": {"B": ["float32", [4], [2.0, 4.0, 6.0, 8.0]]},
                    "parameters": {"sequence_end": False, "sequence_id": 0, "sequence_start": False},
                }
            ),
        ),
    ),
    each_way("a wrong request to an ensemble", call("twice", [["A", "FP32", [3], A[:3]]])),
    each_way("calls within calls", *(call(f"chain_{depth}", ONE, ["OUT"]) for depth in range(4))),
    Case(
        "sequences",
        asked("caller", "sync", sequence(1, FLAG_START), sequence(2), sequence(3, FLAG_END), sequence(4)),
        asked("async_caller", "sync", sequence(1, FLAG_START, 8), sequence(2, 0, 8), sequence(3, FLAG_END, 8)),
        asked("caller", "sync", sequence(1, FLAG_START, 9)),
        asked("caller", "sync", sequence(5, FLAG_END, 9), sequence(9, 0, 99), sequence(1, 0, 0)),
        asked("caller", "sync", sequence(1, FLAG_START | FLAG_END, 10)),
    ),
    *(each_way(f"a decoupled model, {n}", count(n, decoupled=True)) for n in (0, 1, 3, -1, -3)),
    Case("a long stream", asked("caller", "sync", count(300, decoupled=True))),
    Case(
        "an error within a stream",
        asked("caller", "sync", count(1003, decoupled=True)).differs(
            LOST, body=shown([one(0), {"error": "not this one"}, one(2), {}])
        ),
        asked("caller", "sync", count(-1003, decoupled=True)).differs(
            LOST, body=shown([one(0), {"error": "not this one"}, one(2)])
        ),
    ),
    each_way("a decoupled model, iterated twice", count(2, decoupled=True, twice=True)),
    each_way("a decoupled model without decoupled", count(2)),
    each_way(
        "a model that is not decoupled with decoupled", add(decoupled=True), failing("NOT_FOUND") | {"decoupled": True}
    ),
    Case(
        "refused with decoupled",
        asked(
            "caller", "sync", call("nothing", ONE, decoupled=True), call("add_sub", [], BOTH, decoupled=True)
        ).differs(
            UNKNOWN,
            body=shown(
                [{"error": NOTHING}],
                [
                    {
                        "error": "Model add_sub - Error when running inference: [request id: <id_unknown>] expected 2 "
                        "inputs but got 0 inputs for model 'add_sub'. Got input(s) [], but missing required input(s) "
                        "['INPUT0','INPUT1']. Please provide all required input(s)."
                    }
                ],
            ),
        ),
    ),
    each_way("several streams", *(count(n, decoupled=True) for n in (3, 5, 0, -2))),
    each_way("wide", *(add() for _ in range(20))),
    Case(
        "models that are loaded and unloaded",
        asked(
            "caller",
            "sync",
            controlled("load", "late_pair"),
            controlled("ready", "late_pair"),
            call("late_pair", PAIR, BOTH),
        ),
        get("/v2/models/late_pair/ready"),
        asked("caller", "sync", controlled("unload", "late_pair")),
        asked("caller", "sync", controlled("unload", "nothing"), controlled("load", "nothing")),
        asked("caller", "sync", controlled("load", "late_pair", "{")),
        asked("caller", "sync", controlled("load", "late_pair", "", files={"file:1/model.py": "x"})),
        asked("caller", "sync", controlled("load", 5), controlled("ready", 5), controlled("unload", "a", 5)),
    ),
    Case(
        "what a model does in initialize",
        post("/v2/repository/models/late_calls_early/load"),
        post("/v2/repository/models/late_loads/load"),
        number("late_loads", 1),
        post("/v2/repository/models/late_loads/unload"),
        post("/v2/repository/models/late_pair/unload"),
    ),
]

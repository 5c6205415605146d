"""The Python models of Triton's documentation, written anew."""

from __future__ import annotations

import struct
from typing import Any

from bench.oracle.steps import Case, Document, Step, bytes_tensor, counted, get, infer, rpc, stream, tensor

LEFT, RIGHT = [1.5, 2, 3, 4], [0.5, 2, -3, 1e9]


def pair(shape: list[int], names: tuple[str, str] = ("INPUT0", "INPUT1")) -> list[Document]:
    rows = shape[0] if len(shape) > 1 else 1
    return [tensor(name, "FP32", shape, values * rows) for name, values in zip(names, (LEFT, RIGHT), strict=True)]


def image(width: int, height: int, kind: bytes = b"P6") -> bytes:
    pixels = bytes(number * 7 % 256 for number in range(width * height * 3))
    return b"\n".join([kind, b"%d" % width, b"%d" % height, b"255", pixels])


def images(*pictures: bytes) -> Step:
    given = [tensor("IMAGE", "BYTES", [len(pictures), 1], parameters=None)]
    return rpc("ModelInfer", {"model_name": "preprocessing", "inputs": _plain(given)}, [bytes_tensor(*pictures)])


def _plain(given: list[Document]) -> list[Document]:
    return [{key: value for key, value in each.items() if key != "parameters"} for each in given]


def streamed(model: str, *requests: list[tuple[str, str, list[int]]], **more: Any) -> Step:
    """Requests of one stream; an input is its name, its datatype and its values."""
    documents: list[Document] = []
    raws: list[list[bytes]] = []
    for number, inputs in enumerate(requests):
        tensors = [tensor(name, datatype, [len(values)]) for name, datatype, values in inputs]
        documents.append({"model_name": model, "id": str(number), "inputs": tensors, **more})
        raws.append([
            struct.pack(f"<{len(values)}{'i' if datatype == 'INT32' else 'I'}", *values)
            for _, datatype, values in inputs
        ])  # fmt: skip
    return stream(documents, raws)


def repeated(values: list[int], delays: list[int], wait: int = 0) -> list[tuple[str, str, list[int]]]:
    return [("IN", "INT32", values), ("DELAY", "UINT32", delays), ("WAIT", "UINT32", [wait])]


def seconds(value: float) -> Step:
    return infer("custom_metrics", {"inputs": [tensor("SECONDS", "FP32", [1], [value])]})


def numbers(*values: int) -> Step:
    return infer("async_add", {"inputs": [tensor("IN", "INT32", [len(values), 1], list(values))]})


CASES = [
    Case(
        "add_sub",
        infer("add_sub", {"inputs": pair([4])}),
        infer("add_sub", {"inputs": pair([4]), "outputs": [{"name": "OUTPUT1"}]}),
        counted(infer("add_sub", {"inputs": pair([5])}), "INPUT0", 4, 5),
        infer("add_sub", {"inputs": pair([4])[:1]}),
        infer("add_sub", {"inputs": pair([4]), "outputs": [{"name": "OUTPUT2"}]}),
        get("/v2/models/add_sub"),
        get("/v2/models/add_sub/config"),
    ),
    Case(
        "auto_complete",
        get("/v2/models/auto_complete"),
        get("/v2/models/auto_complete/config"),
        infer("auto_complete", {"inputs": pair([1, 4])}),
        infer("auto_complete", {"inputs": pair([3, 4])}),
        infer("auto_complete", {"inputs": pair([4, 4])}),
        infer("auto_complete", {"inputs": pair([4])}),
    ),
    Case(
        "decoupled: repeat",
        streamed("repeat_int32", repeated([4, 2, 0, 1], [1, 1, 1, 1])),
        streamed("repeat_int32", repeated([], [])),
        streamed("repeat_int32", repeated([1, 2], [1, 1], wait=50), repeated([3], [1])),
        streamed("repeat_int32", repeated([1], [1]), outputs=[{"name": "IDX"}]),
        streamed("repeat_int32", repeated([1, 2], [1, 1]), parameters={"triton_enable_empty_final_response": {
            "bool_param": True}}),
        infer("repeat_int32", {"inputs": [
            tensor("IN", "INT32", [1], [1]), tensor("DELAY", "UINT32", [1], [1]), tensor("WAIT", "UINT32", [1], [0])]}),
    ),
    Case(
        "decoupled: square",
        streamed("square_int32", [("IN", "INT32", [3])]),
        streamed("square_int32", [("IN", "INT32", [0])]),
        streamed("square_int32", [("IN", "INT32", [2])], parameters={"triton_enable_empty_final_response": {
            "bool_param": True}}),
    ),
    Case(
        "preprocessing",
        images(image(4, 4)),
        images(image(4, 4), image(7, 3), image(2, 2)),
        images(image(4, 4, b"P5")),
    ),
    Case("custom_metrics", seconds(0.5), seconds(1.25), seconds(0)),
    Case(
        "custom_metrics: a counter that decreases",
        seconds(-1).differs(
            "Triton terminates",
            status="http 500",
            body={"content-type": "text/plain", "json": {}},
            error="Failed to process the request(s) for model 'custom_metrics_0_0', message: TritonModelException: "
            "Failed to increment metric value: Failed to process the request for model 'custom_metrics_0_0', message: "
            "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.\n\nAt:\n"
            "  custom_metrics/1/model.py(20): execute\n",
        ),
    ),
    Case("instance_kind", infer("instance_kind", {"inputs": [tensor("IN", "FP32", [2], [1, 1])]})),
    Case("async execute", numbers(1), numbers(1, 2, 3), numbers(5)),
    Case(
        "async execute that raises in a task",
        numbers(-1).differs(
            "the error shows the frames of all coroutines",
            error="Failed to process the request(s) for model 'async_add_0_0', message: ValueError: a negative number"
            "\n\nAt:\n  async_add/1/model.py(16): one\n  async_add/1/model.py(10): execute\n",
        ),
    ),
]  # fmt: skip

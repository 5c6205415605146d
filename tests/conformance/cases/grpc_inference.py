"""Inference over gRPC: contents, parameters, versions and streams."""

from __future__ import annotations

import struct
from typing import Any

from bench.oracle.steps import Case, Document, Step, bytes_tensor, rpc, stream, tensor

FOUR = struct.pack("<4f", 1, 2, 3, 4)
A, B = tensor("A", "FP32", [4]), tensor("B", "FP32", [4])
TYPED = [{**A, "contents": {"fp32_contents": [1, 2, 3, 4]}}, {**B, "contents": {"fp32_contents": [0, 0, 0, 1]}}]
ONE = tensor("IN", "FP32", [1])


def infer(model: str, inputs: list[Document], raw: list[bytes] | None = None, **more: Any) -> Step:
    return rpc("ModelInfer", {"model_name": model, "inputs": inputs, **more}, raw)


def total(**more: Any) -> Step:
    return infer("sum", [A, B], [FOUR, FOUR], **more)


def told(metadata: dict[str, str] | None = None, /, **parameters: Any) -> Step:
    request = {
        "model_name": "told",
        "id": "7",
        "inputs": [ONE],
        "outputs": [{"name": "TOLD"}],
        "parameters": parameters,
    }
    return rpc("ModelInfer", request, [FOUR[:4]], metadata=metadata)


def typed(datatype: str, field: str, *values: Any, shape: int | None = None) -> Step:
    count = len(values) if shape is None else shape
    given = tensor(f"IN_{datatype}", datatype, [count])
    return infer(
        "types", [{**given, "contents": {f"{field}_contents": list(values)}}], outputs=[{"name": f"OUT_{datatype}"}]
    )


def kind(name: str) -> Step:
    return infer("fail", [tensor("KIND", "BYTES", [1])], [bytes_tensor(name.encode())], id="f")


def classified(output: str, parameter: Document) -> Step:
    return infer(
        "classes",
        [tensor("IN", "FP32", [1, 4])],
        [FOUR],
        outputs=[{"name": output, "parameters": {"classification": parameter}}],
    )


def asked(count: int, number: str = "t", fail_at: int | None = None, **more: Any) -> tuple[Document, list[bytes]]:
    """A request to the model that streams."""
    inputs = [tensor("PROMPT", "BYTES", [1]), tensor("COUNT", "INT32", [1])]
    raw = [bytes_tensor(b"t"), struct.pack("<i", count)]
    if fail_at is not None:
        inputs.append(tensor("FAIL_AT", "INT32", [1]))
        raw.append(struct.pack("<i", fail_at))
    return {"model_name": "tokens", "id": number, "inputs": inputs, **more}, raw


def streamed(*requests: tuple[Document, list[bytes]], metadata: dict[str, str] | None = None) -> Step:
    return stream([request for request, _ in requests], [raw for _, raw in requests], metadata=metadata)


PLAIN: tuple[Document, list[bytes]] = ({"model_name": "sum", "id": "p", "inputs": [A, B]}, [FOUR, FOUR])
EMPTY_FINAL = {"triton_enable_empty_final_response": {"bool_param": True}}

CASES = [
    Case(
        "typed contents",
        typed("BOOL", "bool", True, False),
        typed("INT8", "int", -128, 127),
        typed("INT16", "int", -32768),
        typed("INT32", "int", 5),
        typed("INT64", "int64", 5),
        typed("UINT8", "uint", 255),
        typed("UINT16", "uint", 65535),
        typed("UINT32", "uint", 4294967295),
        typed("UINT64", "uint64", 5),
        typed("FP32", "fp32", 0.5, "NaN"),
        typed("FP64", "fp64", 0.1),
        typed("BYTES", "bytes", "YWJj", ""),
    ),
    Case(
        "typed contents that do not fit",
        typed("INT8", "int", 300),
        typed("UINT8", "uint", 256),
        typed("INT32", "int64", 5),
        typed("FP16", "fp32", 1),
        typed("BF16", "fp32", 1),
        typed("FP32", "fp32", 1, shape=2),
        typed("FP32", "fp32", 1, 2, shape=1),
        typed("BYTES", "bytes", "YQ==", shape=2),
        typed("INT32", "int", shape=0),
        typed("INT32", "int", shape=1),
        infer("types", [{**tensor("IN_INT32", "INT32", [1]), "contents": {"int_contents": [1], "fp32_contents": [1]}}]),
    ),
    Case(
        "raw contents",
        total(),
        total(id="x", model_version="1"),
        infer("sum", [A, B], [FOUR]),
        infer("sum", [A, B], [FOUR] * 3),
        infer("sum", [A, B]),
        infer("sum", [A, B], [FOUR[:15], FOUR]),
        infer("sum", [A, B], [FOUR + b"x", FOUR]),
        infer("sum", [A, B], [b"", FOUR]),
        infer("sum", TYPED),
        infer("sum", TYPED, [FOUR, FOUR]),
        infer("sum", [TYPED[0], B], [FOUR]),
        infer("types", [tensor("IN_BYTES", "BYTES", [2])], [bytes_tensor(b"a", b"")]),
        infer("types", [tensor("IN_BYTES", "BYTES", [1])], [b"\x05\x00\x00\x00ab"]),
        infer("types", [tensor("IN_FP16", "FP16", [1])], [b"\x00\x3c"]),
        infer("types", [tensor("IN_INT32", "INT32", [0])], [b""]),
    ),
    Case(
        "requests that do not fit the model",
        infer("", [A, B], [FOUR, FOUR]),
        infer("no_such", [A, B], [FOUR, FOUR]),
        infer("sum", [A], [FOUR]),
        infer("sum", []),
        infer("sum", [A, A], [FOUR, FOUR]),
        infer("sum", [A, tensor("C", "FP32", [4])], [FOUR, FOUR]),
        infer("sum", [A, tensor("B", "FP32", [2, 2])], [FOUR, FOUR], id="shape"),
        infer("sum", [A, tensor("B", "FP32", [-4])], [FOUR, FOUR]),
        infer("sum", [A, tensor("B", "NONE", [4])], [FOUR, FOUR]),
        infer("sum", [A, tensor("B", "INT32", [4])], [FOUR, FOUR]),
        infer("sum", [A, tensor("B", "FP32", [])], [FOUR, FOUR]),
        infer("rows", [tensor("IN", "INT32", [5, 3]), tensor("FREE", "INT32", [5, 1, 2])], [bytes(60), bytes(40)]),
        infer("rows", [tensor("IN", "INT32", [1, 3]), tensor("FREE", "INT32", [2, 1, 2])], [bytes(12), bytes(16)]),
    ),
    Case(
        "versions of a model",
        *(
            infer("versions", [tensor("IN", "INT32", [1])], [FOUR[:4]], model_version=version)
            for version in ("", "1", "2", "3", "0", "-1", "x", "1x", "01", "99999999999999999999")
        ),
    ),
    Case(
        "outputs",
        total(outputs=[{"name": "DIFFERENCE"}]),
        total(outputs=[{"name": "NONE"}], id="o"),
        total(outputs=[{"name": ""}]),
        total(outputs=[{"name": "SUM"}, {"name": "DIFFERENCE"}]),
    ),
    Case(
        "parameters",
        told(),
        told(a={"string_param": "x"}, b={"int64_param": "-5"}, c={"bool_param": True}),
        told(share={"double_param": 0.5}),
        told(level={"uint64_param": "5"}),
        told(nothing={}),
    ),
    Case(
        "reserved parameters",
        told(triton_x={"int64_param": "1"}),
        told(**EMPTY_FINAL),
        told(triton_enable_empty_final_response={"int64_param": "1"}),
        told(sequence_id={"int64_param": "5"}),
        told(sequence_id={"string_param": "five"}),
        told(sequence_id={"bool_param": True}),
        told(sequence_start={"bool_param": True}),
        told(sequence_start={"int64_param": "1"}),
        told(sequence_end={"string_param": "x"}),
        told(priority={"int64_param": "1"}),
        told(priority={"uint64_param": "1"}),
        told(priority={"int64_param": "-1"}),
        told(priority={"string_param": "1"}),
        told(timeout={"int64_param": "1000000"}),
        told(timeout={"string_param": "1"}),
        told(timeout={"int64_param": "-1"}),
    ),
    Case(
        "metadata that becomes parameters",
        told({"x-case-tenant": "green", "x-other": "no"}),
        told({"x-case-tenant": "green"}, **{"x-case-tenant": {"string_param": "body"}}),
    ),
    Case(
        "what models answer",
        *(
            kind(name)
            for name in (
                "fine",
                "unknown",
                "internal",
                "not_found",
                "invalid_arg",
                "unavailable",
                "unsupported",
                "already_exists",
                "cancelled",
                "plain",
                "raise",
                "few",
                "number",
                "text",
                "none",
            )
        ),
    ),
    Case(
        "classification",
        classified("NAMED", {"int64_param": "2"}),
        classified("HALF", {"int64_param": "2"}),
        classified("NAMED", {"int64_param": "0"}),
        classified("NAMED", {"int64_param": "-1"}),
        classified("NAMED", {"string_param": "2"}),
        classified("NAMED", {"int64_param": "9"}),
    ),
    Case("models that stream, without a stream", rpc("ModelInfer", asked(1)[0], asked(1)[1])),
    Case(
        "streams of models that answer once",
        streamed(PLAIN),
        streamed(PLAIN, PLAIN, PLAIN),
        streamed(),
        streamed(({**PLAIN[0], "parameters": EMPTY_FINAL}, PLAIN[1])),
    ),
    Case(
        "streams of models that answer often",
        streamed(asked(3)),
        streamed(asked(0)),
        streamed(asked(1, "")),
        streamed(asked(2, parameters=EMPTY_FINAL)),
        streamed(asked(0, parameters=EMPTY_FINAL)),
        streamed(asked(2, model_version="1", parameters=EMPTY_FINAL)),
        streamed(asked(3, fail_at=1, parameters=EMPTY_FINAL)),
        streamed(asked(1, fail_at=0)),
    ),
    Case(
        "errors on a stream",
        streamed(({"model_name": "no_such", "id": "n"}, [])),
        streamed(({"model_name": "sum", "id": "m", "inputs": [A]}, [FOUR])),
        streamed(({"model_name": "sum", "model_version": "9", "id": "v", "inputs": [A, B]}, [FOUR, FOUR])),
        streamed(
            ({"model_name": "fail", "id": "f", "inputs": [tensor("KIND", "BYTES", [1])]}, [bytes_tensor(b"not_found")])
        ),
        streamed(({**PLAIN[0], "parameters": {"triton_x": {"bool_param": True}}}, PLAIN[1])),
        streamed(({**PLAIN[0], "parameters": {"triton_enable_empty_final_response": {"string_param": "x"}}}, PLAIN[1])),
    ),
    Case(
        "streams whose errors are statuses",
        streamed(({"model_name": "no_such", "id": "n"}, []), metadata={"triton_grpc_error": "true"}),
        streamed(
            ({"model_name": "fail", "id": "f", "inputs": [tensor("KIND", "BYTES", [1])]}, [bytes_tensor(b"not_found")]),
            metadata={"triton_grpc_error": "true"},
        ),
        # Ends Triton 2.51 now and then (CVE-2026-24266); what is recorded is its answer when it does not.
        streamed(asked(3, fail_at=1), metadata={"triton_grpc_error": "true"}),
        streamed(PLAIN, metadata={"triton_grpc_error": "true"}),
        streamed(({"model_name": "no_such", "id": "n"}, []), metadata={"triton_grpc_error": "false"}),
    ),
]

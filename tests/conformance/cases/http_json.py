"""Literals, nesting and syntax of JSON requests."""

from __future__ import annotations

from typing import Any

from bench.oracle.steps import ERROR, Case, Document, Step, infer, post, tensor


def typed(datatype: str, *values: Any) -> Step:
    """One tensor of a data type there and back."""
    return infer(
        "types",
        {
            "inputs": [tensor(f"IN_{datatype}", datatype, [len(values)], list(values))],
            "outputs": [{"name": f"OUT_{datatype}"}],
        },
    )


def text(content: str) -> Step:
    """A request of this very text to the model `types`."""
    return post("/v2/models/types/infer", content.encode())


def data(datatype: str, content: str, shape: str = "[1]") -> Step:
    return text(
        f'{{"inputs":[{{"name":"IN_{datatype}","datatype":"{datatype}","shape":{shape},"data":{content}}}],'
        f'"outputs":[{{"name":"OUT_{datatype}"}}]}}'
    )


DEEP = "[" * 99 + "1" + "]" * 99

LAST_COUNTS = "of a member that is given twice the last one counts"


def answered(outputs: list[Document]) -> Document:
    """The body of an answer of the model `types`."""
    told = {"model_name": "types", "model_version": "1", "outputs": outputs}
    return {"content-type": "application/json", "json": told}


CASES = [
    Case(
        "ends of every range",
        typed("INT8", -128, 127),
        typed("INT16", -32768, 32767),
        typed("INT32", -(2**31), 2**31 - 1),
        typed("INT64", -(2**63), 2**63 - 1),
        typed("UINT8", 0, 255),
        typed("UINT16", 0, 65535),
        typed("UINT32", 0, 2**32 - 1),
        typed("UINT64", 0, 2**64 - 1),
        typed("BOOL", True, False),
        typed("FP32", 3.4028234663852886e38, -1.1754943508222875e-38, 0.1),
        typed("FP64", 1.7976931348623157e308, 5e-324),
    ),
    Case(
        "narrow integers out of range",
        typed("INT8", 128),
        typed("INT8", -129),
        typed("UINT8", 256),
        typed("UINT8", 300),
        typed("INT16", 40000),
        typed("UINT16", 65536),
    ),
    Case(
        "integers out of range",
        typed("INT32", 2**31),
        typed("INT32", 2**63),
        typed("INT64", 2**63),
        typed("INT64", -(2**63) - 1),
        typed("UINT8", -1),
        typed("UINT32", 2**32),
        typed("UINT64", -1),
        typed("UINT64", 2**64),
    ),
    Case(
        "literals of another kind",
        typed("INT32", 1.5),
        typed("INT32", 1.0),
        typed("INT32", True),
        typed("INT32", "1"),
        typed("INT32", None),
        typed("UINT64", 1.0),
        typed("BOOL", 1),
        typed("BOOL", "true"),
        typed("FP32", "1"),
        typed("FP32", True),
        typed("FP32", None),
        typed("FP64", 1),
        typed("BYTES", 1),
        typed("BYTES", None),
        typed("BYTES", {"a": 1}),
    ),
    Case(
        "literals that JSON does not have",
        data("FP32", "[NaN]"),
        data("FP64", "[Infinity,-Infinity,NaN]", "[3]"),
        data("FP32", "[Inf]"),
        data("FP32", "[-Inf]"),
        data("FP32", "[nan]"),
        data("INT32", "[NaN]"),
        data("FP32", "[1e39]"),
        data("FP64", "[1e400]"),
        data("FP32", "[+1]"),
        data("FP32", "[.5]"),
        data("FP32", "[1.]"),
        data("INT32", "[01]"),
        data("INT32", "[0x10]"),
        data("FP64", "[1E2,-0.0,-0]", "[3]"),
    ),
    Case(
        "strings",
        typed("BYTES", "", "plain", "søn", "\U0001f600"),
        data("BYTES", r'["\u0000\n\t\"\\\/"]'),
        data("BYTES", r'["\ud83d\ude00"]'),
        data("BYTES", r'["\ud83d"]'),
        data("BYTES", r'["\x41"]'),
        data("BYTES", '["a\nb"]'),
    ),
    Case(
        "data types without a JSON form",
        typed("FP16", 1.0),
        typed("BF16", 1.0),
        infer("types", {"inputs": [tensor("IN_FP16", "FP16", [1], binary_data_size=2)]}, b"\x00\x3c"),
        infer(
            "types",
            {
                "inputs": [tensor("IN_FP16", "FP16", [1], binary_data_size=2)],
                "outputs": [{"name": "OUT_FP16", "parameters": {"binary_data": True}}],
            },
            b"\x00\x3c",
        ),
    ),
    Case(
        "nesting",
        data("INT32", DEEP),
        data("INT32", f"[{DEEP}]"),
        data("INT32", f"[[{DEEP}]]").differs(
            "newer Tritons have a limit",
            status="http 400",
            error="Unable to parse 'data': JSON nesting depth exceeds maximum allowed limit (100)",
            body=ERROR,
        ),
        data("INT32", "[[1],[2,3]]", "[3]"),
        data("INT32", "[[],[1]]"),
        data("INT32", "[]", "[0]"),
        data("INT32", "[[[]]]", "[0]"),
    ),
    Case(
        "syntax",
        text(""),
        text(" "),
        text("null"),
        text("5"),
        text('"text"'),
        text("[]"),
        text("{}"),
        text("{"),
        text('{"inputs"'),
        text('{"inputs":[]'),
        text('{"inputs":[]}}'),
        text('{"inputs":[],}'),
        text("{'inputs':[]}"),
        text('{"inputs":[} ]'),
        text('{"inputs":tru}'),
        text('{"inputs":[1 2]}'),
        text('{"a":1 "b":2}'),
        text('{"a" 1}'),
        text("{a:1}"),
        text('{"a":"\\q"}'),
        text('{"a":"unfinished}'),
        text('{"a":"\\u12"}'),
        text("﻿{}"),
        text('{"a":-}'),
        text('{"a":1e}'),
        text('{"a":1.}'),
        text("{} trailing"),
        text("/* comment */ {}"),
    ),
    Case(
        "members twice",
        text('{"inputs":[{"name":"IN_INT32","datatype":"INT32","shape":[1],"data":[1]}],"inputs":[]}').differs(
            LAST_COUNTS, body=answered([])
        ),
        text(
            '{"inputs":[{"name":"IN_INT8","name":"IN_INT32","datatype":"INT32","shape":[1],"data":[1],"data":[2]}]}'
        ).differs(
            LAST_COUNTS,
            status="http 200",
            error=None,
            body=answered([{"name": "OUT_INT32", "datatype": "INT32", "shape": [1], "data": [2]}]),
        ),
        text(
            '{"id":"a","id":"b","inputs":[{"name":"IN_INT32","datatype":"INT32","shape":[1],"data":[1]}],'
            '"outputs":[{"name":"OUT_INT32"},{"name":"OUT_INT32"}]}'
        ).differs(
            f"{LAST_COUNTS}, and newer Tritons refuse an output that is asked for twice",
            status="http 400",
            error="[request id: b] output 'OUT_INT32' already exists in request",
            body=ERROR,
        ),
    ),
    Case(
        "an input twice",
        text(
            '{"inputs":[{"name":"IN_INT32","datatype":"INT32","shape":[1],"data":[1]},'
            '{"name":"IN_INT32","datatype":"INT32","shape":[1],"data":[2]}]}'
        ),
    ),
    Case(
        "shapes that are too large",
        data("INT32", "[1]", "[9223372036854775807]").differs(
            "the recorded Triton multiplies beyond 64 bits and ends (CVE-2026-24210)",
            status="http 400",
            error="byte size overflow for input 'IN_INT32': element count (9223372036854775807) * data type size (4) "
            "exceeds maximum allowed size (9223372036854775807)",
            body=ERROR,
        ),
        data("INT32", "[1]", "[9223372036854775808]").differs(
            "newer Tritons check dimensions",
            status="http 400",
            error="invalid shape for input 'IN_INT32': shape [-9223372036854775808] contains one or more invalid "
            "dimensions",
        ),
        data("INT32", "[1]", "[4294967296,4294967296]").differs(
            "newer Tritons check dimensions",
            error="invalid shape for input 'IN_INT32': shape [4294967296,4294967296] causes total element count to "
            "exceed maximum size of 9223372036854775807",
        ),
        data("INT32", "[1]", "[18446744073709551616]"),
        data("BYTES", "[]", "[9223372036854775807]"),
    ),
]

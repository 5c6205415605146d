"""/generate and /generate_stream."""

from __future__ import annotations

import json
from typing import Any

from bench.oracle.steps import ERROR, Case, Document, Step, counted, gzipped, post


def generate(model: str, body: Any, **headers: str) -> Step:
    return post(f"/v2/models/{model}/generate", body, headers)


def streamed(model: str, body: Any, **headers: str) -> Step:
    return post(f"/v2/models/{model}/generate_stream", body, headers)


def prompt(**more: Any) -> Step:
    return generate("prompt", {"PROMPT": "hello", **more})


OWN_STATUS = "newer Tritons answer with the status of the error that comes first"


def answered(**outputs: Any) -> Document:
    """The body of an answer of the model `prompt`."""
    named = {**outputs, "model_name": "prompt", "model_version": "1"}
    return {"content-type": "application/json", "json": named}


CASES = [
    Case(
        "one answer",
        prompt(),
        prompt(id="42"),
        prompt(COUNT=3),
        prompt(COUNT=[1, 2, 3]),
        prompt(COUNT=[]),
        counted(prompt(COUNT=[[1, 2], [3, 4]]), "COUNT", 4, 2),
        prompt(SURE=True),
        prompt(SURE=[False]),
        prompt(PROMPT=["one"]),
        prompt(PROMPT=["one", "two"]),
        prompt(PROMPT=[]),
        prompt(GRID=[1, 2, 3, 4]),
        prompt(GRID=[1, 2, 3]),
        counted(prompt(GRID=[[1.5, 2], [3, 4]]), "GRID", 4, 2),
        prompt(GRID=1),
        prompt(GRID=[]),
    ),
    Case(
        "values of another kind",
        prompt(PROMPT=5),
        prompt(PROMPT=None),
        prompt(PROMPT={"a": 1}),
        prompt(COUNT="3"),
        prompt(COUNT=2.5),
        prompt(COUNT=2**40),
        prompt(COUNT=True),
        prompt(SURE=1),
        prompt(GRID="x"),
        prompt(COUNT=None),
    ),
    Case(
        "members that are no inputs",
        prompt(temperature=0.5),
        prompt(top_k=3, stop="x", greedy=True),
        prompt(nothing=None),
        prompt(many=[1]),
        prompt(inner={"a": 1}),
        prompt(large=2**63),
        prompt(large=-(2**63)),
    ),
    Case(
        "nested parameters",
        prompt(parameters={"a": 1, "b": "x"}),
        prompt(parameters={"COUNT": 3}),
        prompt(parameters={}),
        prompt(parameters=5),
        prompt(parameters=[]),
        prompt(parameters={"a": {"b": 1}}),
        prompt(parameters={"a": [1]}),
        prompt(parameters={"parameters": 5}),
        prompt(parameters={"COUNT": "x"}),
        generate("prompt", {"parameters": {"PROMPT": "inside"}}),
    ),
    Case(
        "reserved members",
        prompt(sequence_id=5),
        prompt(priority=3),
        prompt(timeout=1000000),
        prompt(triton_x=1),
        prompt(binary_data_output=True),
        prompt(model_name="x"),
        prompt(id=5),
        prompt(sequence_start=True),
        prompt(sequence_id="x"),
    ),
    Case(
        "requests without what the model needs",
        generate("prompt", {}),
        generate("prompt", b""),
        generate("prompt", b"{"),
        generate("prompt", b"[]"),
        generate("prompt", b"5"),
        generate("prompt", b'"x"'),
        generate("no_such", {"PROMPT": "x"}),
        post("/v2/models/prompt/versions/1/generate", {"PROMPT": "x"}),
        post("/v2/models/prompt/versions/9/generate", {"PROMPT": "x"}),
        generate("sum", {"A": [1, 2, 3, 4]}),
        generate("sum", {"A": [1, 2, 3, 4], "B": [0, 0, 0, 0]}),
        generate("sum", {"A": [1, 2, 3], "B": [0, 0, 0, 0]}),
    ),
    Case(
        "batches",
        generate("rows", {"IN": [1, 2, 3], "FREE": [1, 2]}),
        generate("rows", {"IN": [1, 2, 3], "FREE": [1, 2, 3, 4]}),
        generate("rows", {"IN": [1, 2, 3, 4, 5, 6], "FREE": [1, 2]}),
        generate("classes", {"IN": [1, 2, 3, 4]}),
    ),
    Case(
        "errors of models",
        generate("fail", {"KIND": "fine"}),
        generate("fail", {"KIND": "not_found"}).differs(OWN_STATUS, status="http 404"),
        generate("fail", {"KIND": "unavailable"}).differs(OWN_STATUS, status="http 503"),
        generate("fail", {"KIND": "raise"}).differs(OWN_STATUS, status="http 500"),
        streamed("fail", {"KIND": "fine"}),
        streamed("fail", {"KIND": "invalid_arg"}),
        streamed("fail", {"KIND": "unsupported"}).differs(OWN_STATUS, status="http 501"),
    ),
    Case(
        "exactly one answer",
        *(generate("tokens", {"PROMPT": "t", "COUNT": count}) for count in (1, 0, 2, 5)),
        generate("tokens", {"PROMPT": "t", "COUNT": 1, "FAIL_AT": 0}).differs(OWN_STATUS, status="http 500"),
        generate("tokens", {"PROMPT": "t", "COUNT": 2, "FAIL_AT": 1}),
    ),
    Case(
        "streams",
        *(streamed("tokens", {"PROMPT": "t", "COUNT": count}) for count in (1, 3, 0)),
        streamed("tokens", {"PROMPT": "t", "COUNT": 2, "id": "9"}),
        streamed("tokens", {"PROMPT": "t", "COUNT": 3, "FAIL_AT": 0}).differs(OWN_STATUS, status="http 500"),
        streamed("tokens", {"PROMPT": "t", "COUNT": 3, "FAIL_AT": 1}),
        streamed("tokens", {"PROMPT": "t", "COUNT": 3, "FAIL_AT": 2}),
        streamed("prompt", {"PROMPT": "one"}),
        streamed("tokens", {"PROMPT": "t"}),
        streamed("no_such", {"PROMPT": "t"}),
        streamed("tokens", b"{"),
        streamed("tokens", {"PROMPT": "t", "COUNT": "x"}),
        post("/v2/models/tokens/versions/1/generate_stream", {"PROMPT": "t", "COUNT": 1}),
    ),
    Case(
        "headers",
        generate("prompt", gzipped(b"{}"), **{"Content-Encoding": "gzip"}),
        generate("prompt", {"PROMPT": "x"}, **{"Content-Encoding": "identity"}),
        generate("prompt", {"PROMPT": "x"}, **{"Accept-Encoding": "gzip"}),
        generate("prompt", {"PROMPT": "x"}, **{"X-Case-Tenant": "green"}),
        streamed("tokens", {"PROMPT": "x", "COUNT": 1}, **{"Accept-Encoding": "gzip"}),
        streamed("tokens", gzipped(b"{}"), **{"Content-Encoding": "gzip"}),
    ),
    Case(
        "literals",
        generate("prompt", b'{"PROMPT":"x","GRID":[NaN,1]}'),
        generate("prompt", b'{"PROMPT":"x","p":NaN}'),
        generate("prompt", b'{"PROMPT":"x","PROMPT":"y"}'),
        generate("prompt", json.dumps({"PROMPT": "søn"}).encode()),
        generate("prompt", b'{"PROMPT":"x","COUNT":' + b"[" * 101 + b"1" + b"]" * 101 + b"}").differs(
            "newer Tritons have a limit",
            status="http 400",
            error="Unable to parse 'data': JSON nesting depth exceeds maximum allowed limit (100)",
            body=ERROR,
        ),
    ),
]

"""What the server says to requests that do not fit a model, over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.oracle.steps import Case, counted, infer, tensor

if TYPE_CHECKING:
    from bench.oracle.steps import Document, Step

A = tensor("A", "FP32", [4], [1.0, 2.0, 3.0, 4.0])
B = tensor("B", "FP32", [4], [0.5, 0.5, 0.5, 0.5])
IN = tensor("IN", "INT32", [1, 3], [1, 2, 3])
FREE = tensor("FREE", "INT32", [1, 1, 2], [4, 5])


def total(*inputs: Document, **more: Any) -> Step:
    return infer("sum", {"inputs": list(inputs), **more})


def rows(*inputs: Document, **more: Any) -> Step:
    return infer("rows", {"inputs": list(inputs), **more})


def told(**parameters: Any) -> Step:
    return infer(
        "told",
        {
            "id": "7",
            "inputs": [tensor("IN", "FP32", [1], [1.0])],
            "parameters": parameters,
            "outputs": [{"name": "TOLD"}],
        },
    )


CASES = [
    Case(
        "inputs, too few and too many",
        rows(IN),
        rows(FREE),
        rows(IN, FREE, tensor("EXTRA", "FP32", [1, 1], [0.5])),
        rows(IN, FREE, tensor("EXTRA", "FP32", [1, 1], [0.5]), tensor("MORE", "INT32", [1], [1])),
        rows(IN, tensor("EXTRA", "FP32", [1, 1], [0.5])),
        rows(IN, FREE, tensor("OTHER", "INT32", [1, 1], [1])),
        infer("types", {"inputs": []}),
        infer("types", {"inputs": [tensor("IN_NEW", "INT32", [1], [1])]}),
    ),
    Case(
        "inputs that are none",
        total(A, {}),
        infer("sum", {"inputs": "A"}),
        infer("sum", {"inputs": [1]}),
        infer("sum", {"inputs": {"A": 1}}),
        total({**A, "name": 5}, B),
        total({**A, "datatype": 32}, B),
        total({**A, "shape": "[4]"}, B),
        total({**A, "shape": [4.5]}, B),
        total({**A, "shape": ["4"]}, B),
        total({**A, "shape": 4}, B),
        total({**A, "name": ""}, B),
        total({**A, "datatype": ""}, B),
        total({**A, "datatype": "fp32"}, B),
    ),
    Case(
        "shapes",
        total({**A, "shape": []}, B),
        total({**A, "shape": [2, 2]}, B),
        total({**A, "shape": [0]}, B),
        total({**A, "shape": [4, 1]}, B),
        rows({**IN, "shape": [3]}, FREE),
        rows({**IN, "shape": [1, 3, 1]}, FREE),
        rows({**IN, "shape": []}, FREE),
        rows(IN, tensor("FREE", "INT32", [1, 2, 2], [1, 2, 3, 4])),
        rows(IN, tensor("FREE", "INT32", [1, 2, 3], [1, 2, 3, 4, 5, 6])),
        rows(IN, {**FREE, "shape": [1, 2]}),
    ),
    Case(
        "batches",
        rows(tensor("IN", "INT32", [2, 3], [1] * 6), FREE),
        rows(tensor("IN", "INT32", [5, 3], [1] * 15), tensor("FREE", "INT32", [5, 1, 2], [1] * 10)),
        rows(tensor("IN", "INT32", [4, 3], [1] * 12), tensor("FREE", "INT32", [4, 2, 2], [1] * 16)),
    ),
    Case(
        "data types",
        total({**A, "datatype": "FP64"}, B),
        total({**A, "datatype": "BYTES", "data": ["a", "b", "c", "d"]}, B),
        total(A, {**B, "datatype": "INT32", "data": [1, 2, 3, 4]}),
        rows({**IN, "datatype": "INT64"}, FREE),
    ),
    Case(
        "element counts",
        counted(total({**A, "data": [1.0, 2.0, 3.0]}, B), "A", 3, 4),
        counted(total({**A, "data": [1.0] * 5}, B), "A", 5, 4),
        counted(total({**A, "data": []}, B), "A", 0, 4),
        total({**A, "data": [[1.0, 2.0], [3.0, 4.0]]}, B),
        total({**A, "data": 1.0}, B),
        infer("types", {"inputs": [tensor("IN_BYTES", "BYTES", [2], ["a"])]}),
        infer("types", {"inputs": [tensor("IN_BYTES", "BYTES", [1], ["a", "b"])]}),
    ),
    Case(
        "data given in several ways, or in none",
        total({"name": "A", "datatype": "FP32", "shape": [4]}, B),
        total({**A, "parameters": {"binary_data_size": 16}}, B),
        total({**A, "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}}, B),
        total({"name": "A", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16}}, B),
        total({"name": "A", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": "16"}}, B),
    ),
    Case(
        "outputs",
        total(A, B, outputs=[{"name": "SUM"}, {"name": "NOTHING"}]),
        total(A, B, outputs=[]),
        total(A, B, outputs=[{"name": "DIFFERENCE"}, {"name": "SUM"}]),
        total(A, B, outputs=[{}]),
        total(A, B, outputs="SUM"),
        total(A, B, outputs=[{"name": 1}]),
        total(A, B, outputs=["SUM"]),
        total(A, B, outputs=[{"name": "SUM", "parameters": {"binary_data": "yes"}}]),
        total(A, B, outputs=[{"name": "SUM", "parameters": {"classification": "2"}}]),
        total(A, B, outputs=[{"name": "SUM", "parameters": {"nonsense": 1}}]),
    ),
    Case(
        "ids",
        total(A, B, id='with "quotes" and søn'),
        total(A, B, id=5),
        total(A, B, id=""),
        total(A, id="one input"),
        counted(total(A, {**B, "shape": [3]}, id="shape"), "B", 4, 3),
        counted(rows({**IN, "shape": [1, 4]}, FREE, id="line\nbreak"), "IN", 3, 4),
        total(A, B, id="out", outputs=[{"name": "NOTHING"}]),
    ),
    Case(
        "parameters of a request",
        told(tenant="blue", level=3, dry=True, share=0.25),
        told(level=-5, large=9007199254740993),
        told(nothing=None),
        told(many=[1, 2]),
        told(inner={"a": 1}),
        told(),
        infer("told", {"inputs": [tensor("IN", "FP32", [1], [1.0])], "parameters": [1]}),
        infer("told", {"inputs": [tensor("IN", "FP32", [1], [1.0])], "parameters": "a"}),
    ),
    Case(
        "reserved parameters",
        told(triton_enable_empty_final_response=True),
        told(triton_anything=1),
        told(binary_data_output="yes"),
    ),
    Case(
        "sequence parameters on a model without sequences",
        told(sequence_id=5),
        told(sequence_id=5, sequence_start=True, sequence_end=True),
        told(sequence_id="five"),
        told(sequence_id=-1),
        told(sequence_id=2.5),
        told(sequence_start=1),
        told(sequence_end="yes"),
    ),
    Case(
        "priority and time-out",
        told(priority=1),
        told(priority=-1),
        told(priority="high"),
        told(timeout=1000000),
        told(timeout=-1),
        told(timeout="soon"),
        told(timeout=1.5),
    ),
    Case(
        "headers that become parameters",
        infer(
            "told",
            {"inputs": [tensor("IN", "FP32", [1], [1.0])], "outputs": [{"name": "TOLD"}]},
            headers={"X-Case-Tenant": "green", "x-case-two": "2", "X-Other": "no"},
        ),
        infer(
            "told",
            {
                "inputs": [tensor("IN", "FP32", [1], [1.0])],
                "outputs": [{"name": "TOLD"}],
                "parameters": {"x-case-tenant": "body"},
            },
            headers={"x-case-tenant": "header"},
        ),
    ),
    Case(
        "versions",
        *(
            infer("versions", {"inputs": [tensor("IN", "INT32", [2], [1, 2])]}, version=version)
            for version in ("", "1", "3", "2", "0", "-1", "x", "01", "99999999999999999999", "1x")
        ),
    ),
    Case(
        "names of models",
        *(infer(name, {"inputs": []}) for name in ("no_such", "Sum", "sum%20", "s%75m", "..", "sum/versions")),
    ),
    Case(
        "what models answer",
        *(
            infer("fail", {"id": "f", "inputs": [tensor("KIND", "BYTES", [1], [kind])]})
            for kind in (
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
]

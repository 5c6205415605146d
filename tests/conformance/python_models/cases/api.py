"""Each function of `models/probes/1/model.py` is called in both servers."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from bench.oracle.steps import Case, Document, Step, bytes_tensor, rpc, tensor

PROBES = Path(__file__).parent.parent / "models/probes/1/model.py"
#: What ends Triton's server or its model's process, so that there is nothing to compare. Ours raise exceptions.
FATAL = {
    "dlpack_from_numpy", "dlpack_of_a_column", "dlpack_of_complex", "dlpack_twice",
    "made_request", "metric_counter_negative",
    "metric_counter_set", "metric_counter_observe", "metric_gauge_observe", "metric_histogram_value",
    "metric_histogram_set", "metric_histogram_increment", "metric_histogram_buckets_descend",
}  # fmt: skip

NAMES = [
    name
    for name in re.findall(r"^def (\w+)\(request\)", PROBES.read_text(encoding="utf-8"), re.MULTILINE)
    if name not in FATAL
]


#: What is different on purpose: the reason, and what ours returns or raises.
DIFFERENCES = {
    "request_input_of_none": (
        "the attribute has another name",
        "AttributeError: 'NoneType' object has no attribute '_inputs'",
    ),
    "made_list_as_parameters": (
        "Triton names a class of C++",
        "TritonModelException: Expect dict, got <class 'list'>",
    ),
    "made_sender": ("a request that a model makes has no responses of its own to send", "None"),
    "trace_made": ("Triton 2.51 has no name for the class", "<InferenceTrace object at 0x>"),
    "types_of_numpy": (
        "Python's own bool is a datatype, too",
        "list [1, 1, 2, 9, 10, 12, 13, 13, None, None, None]",
    ),
    "strings_deserialized_short": (
        "the error says which element is cut off",
        "BadFraming: element 0 does not fit into the 2 bytes that are left",
    ),
    "config_decoupled": ("a policy that does not say it is not decoupled", "list [False, False, True]"),
}


def result(text: str) -> Document:
    """The response with this result."""
    return {
        "model_name": "probes",
        "model_version": "1",
        "outputs": [{"name": "RESULT", "datatype": "BYTES", "shape": ["1"]}],
        "raw_output_contents": [base64.b64encode(bytes_tensor(text.encode())).decode()],
    }


def probe(name: str) -> Step:
    inputs = [tensor("PROBE", "BYTES", [1]), tensor("OTHER", "BF16", [2])]
    step = rpc("ModelInfer", {"model_name": "probes", "inputs": inputs}, [bytes_tensor(name.encode()), b"\0\1\2\3"])
    if name not in DIFFERENCES:
        return step
    reason, text = DIFFERENCES[name]
    return step.differs(reason, body=result(text))


CASES = [Case(name, probe(name)) for name in NAMES]

"""Each function of `models/probes/1/model.py` is called in both servers."""

from __future__ import annotations

import re
from pathlib import Path

from bench.oracle.steps import Case, Step, bytes_tensor, rpc, tensor

PROBES = Path(__file__).parent.parent / "models/probes/1/model.py"
#: What ends Triton's server or its model's process, so that there is nothing to compare. Ours raise exceptions.
FATAL = {
    "dlpack_from_numpy", "dlpack_of_a_column", "dlpack_of_complex", "dlpack_twice",
    "made_request", "metric_counter_negative",
    "metric_counter_set", "metric_counter_observe", "metric_gauge_observe", "metric_histogram_value",
    "metric_histogram_set", "metric_histogram_increment",
}  # fmt: skip

NAMES = [
    name
    for name in re.findall(r"^def (\w+)\(request\)", PROBES.read_text(encoding="utf-8"), re.MULTILINE)
    if name not in FATAL
]


def probe(name: str) -> Step:
    inputs = [tensor("PROBE", "BYTES", [1]), tensor("OTHER", "BF16", [2])]
    return rpc("ModelInfer", {"model_name": "probes", "inputs": inputs}, [bytes_tensor(name.encode()), b"\0\1\2\3"])


CASES = [Case(name, probe(name)) for name in NAMES]

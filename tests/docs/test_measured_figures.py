"""Figures that several documents state are those of bench/results/, which the measurements write."""

from __future__ import annotations

import json
import re
from statistics import geometric_mean
from typing import Any

import pytest

from tests.docs.documents import DOCUMENTS, ROOT

RESULTS = ROOT / "bench" / "results"
MANY_MODELS = (1, 40, 100, 200)


def rates() -> dict[str, float]:
    """Return each row of loads with our rate divided by Triton's."""
    rows = json.loads((RESULTS / "two-cores.json").read_text())["rows"]
    return {row["row"]: row["rate_ratio"] for row in rows}


def ratios() -> list[float]:
    return list(rates().values())


def density(server: str, models: int) -> tuple[str, str]:
    """Return until when so many Python models are ready, and the memory of all processes, as documents show it."""
    points: list[dict[str, Any]] = json.loads((RESULTS / "density.json").read_text())["points"]
    [point] = [p for p in points if (p["kind"], p["server"], p["models"]) == ("python", server, models)]
    ready_s = point["ready_s"]
    shown = f"{ready_s:.2f}" if ready_s < 1 else f"{ready_s:.1f}" if ready_s < 20 else f"{ready_s:.0f}"
    return f"{shown} s", f"{point['footprint']['together']['proportional'] / 2**20:,.0f} MiB"


def test_the_mean_of_all_rows_is_the_same_everywhere() -> None:
    mean, count = f"{geometric_mean(ratios()):.1f}", len(ratios())
    readme = (ROOT / "README.md").read_text()
    assert f"| requests per second relative to Triton, geometric mean of {count} loads | {mean} | 1 |" in readme
    performance = (ROOT / "docs" / "performance.md").read_text()
    assert f"{count} rows), the\ngeometric mean of the rates is {mean} times Triton's" in performance


#: Each line of the table of loads: what it says, its form, and the rows of loads that it is about.
LOADS = [
    ("a single client and small tensors", "{} to {}", r"(small|onnx) (http|grpc) c=1"),
    ("8 and 32 clients, small tensors", "{} to {}", r"(small|onnx) (http|grpc) c=(8|32)"),
    ("tensors in shared memory", "{} to {}; 1 MiB over HTTP with a single client 1.3",
     r"1M shm (grpc.*|http c=4)|16M shm.*"),
    ("bodies of 1 and 16 MiB", "{} to {}", r"(1|16)M body .*"),
    ("a decoupled model", "{}", r"decoupled .*"),
    ("small tensors, batched", "{} to {}", r"batched .*"),
    ("small tensors on a stream", "{}", r"small grpc stream .*"),
    ("an ensemble, also with tensors in shared memory", "{} to {}", r"(16M )?ensemble .*"),
    ("a Python model that calls another one, 4 clients", "{} and {}", r"call of another model .*"),
    ("batches with a queue delay of 500 µs, 4 clients", "{} and {}", r"queue delay .*"),
]  # fmt: skip


@pytest.mark.parametrize(("load", "form", "rows"), LOADS, ids=[load for load, _, _ in LOADS])
def test_the_table_of_loads_is_measured(load: str, form: str, rows: str) -> None:
    found = sorted(ratio for row, ratio in rates().items() if re.fullmatch(rows, row))
    shown = [f"{ratio:.1f}".removesuffix(".0") for ratio in (found[0], found[-1])]
    assert f"| {load} | {form.format(*shown)} |" in (ROOT / "docs" / "performance.md").read_text()


def test_each_load_is_in_the_table_once() -> None:
    lines = {row: [load for load, _, rows in LOADS if re.fullmatch(rows, row)] for row in rates()}
    # Said in the line about shared memory, since it is far from the others.
    assert [row for row, found in lines.items() if len(found) != 1] == ["1M shm http c=1"]
    assert f"{rates()['1M shm http c=1']:.1f}" == "1.3"


def test_the_figures_of_40_models_in_the_readme_are_measured() -> None:
    (ready, memory), (ready_triton, memory_triton) = density("ours", 40), density("triton", 40)
    readme = (ROOT / "README.md").read_text()
    assert f"| 40 Python models are ready after | {ready} | {ready_triton} |" in readme
    assert f"| memory of all processes with 40 Python models | {memory} | {memory_triton} |" in readme


@pytest.mark.parametrize("models", MANY_MODELS)
def test_the_table_of_many_models_is_measured(models: int) -> None:
    (ready, memory), (ready_triton, memory_triton) = density("ours", models), density("triton", models)
    row = f"| {models} | {ready}, {ready_triton} | {memory}, {memory_triton} |"
    assert row in (ROOT / "docs" / "performance.md").read_text()


def test_documents_install_from_a_checkout() -> None:
    """The package is in no index yet: a document that names it there would lead nowhere."""
    named = re.compile(r"pip install[^\n`]*\bnaiad-server\b")
    found = {
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in DOCUMENTS
        for line in file.read_text().splitlines()
        if named.search(line)
    }
    assert found == set()

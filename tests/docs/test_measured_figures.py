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


def ratios() -> list[float]:
    rows = json.loads((RESULTS / "two-cores.json").read_text())["rows"]
    return [row["rate_ratio"] for row in rows]


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

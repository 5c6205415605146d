"""docs/monitoring: each metric that rules and dashboard use exists, and promtool reads them where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.documents import DASHBOARD, ROOT
from tests.docs.metrics_page import kinds, language_kinds, shown_page

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "docs" / "monitoring"
RULES, RULE_TESTS = FOLDER / "alerts.yaml", FOLDER / "alerts-test.yaml"

#: What the samples of a family add to its name.
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}
LABELS = {"datasource", "job", "instance", "model"}


def promtool(*arguments: str | Path) -> str:
    """Return what promtool complains of; skips the test where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("'promtool' is not installed: it is in the package prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=50, check=False, cwd=FOLDER)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def sample_names() -> set[str]:
    """Return the names of all samples that can be on the metrics page."""
    found = kinds(shown_page(cache=False)) | kinds(shown_page(cache=True)) | language_kinds()
    return {f"{name}{suffix}" for name, kind in found.items() for suffix in SUFFIXES.get(kind, ("",))}


def names_in(text: str) -> set[str]:
    """Return the names of metrics in a text."""
    return set(re.findall(r"\b(?:(?:nv|naiad)_|vllm:)\w+", text))


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def queries() -> list[str]:
    """Return the queries of the dashboard."""
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


@pytest.mark.parametrize("path", [RULES, RULE_TESTS, DASHBOARD], ids=lambda path: path.name)
def test_every_metric_that_is_used_exists(path: Path) -> None:
    used = names_in(path.read_text())
    assert used, "the file uses no metric"
    known = sample_names()
    assert {name for name in used if name not in known | families()} == set()


def families() -> set[str]:
    """Return the names of families, which texts use."""
    return set(kinds(shown_page(cache=False)))


def test_queries_name_samples_and_not_families() -> None:
    expressions = re.findall(r"expr: (?:\|\n((?: {10}.*\n)+)|(.+))", RULES.read_text())
    assert len(expressions) == RULES.read_text().count("- alert:")
    texts = [*("".join(pair).partition("#")[0] for pair in expressions), *queries()]
    assert {name for text in texts for name in names_in(text)} - sample_names() == set()


def test_every_rule_has_a_test() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    fired = re.findall(r"alertname: (\w+)\n +exp_alerts:", RULE_TESTS.read_text())
    assert alerts == set(fired)


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    assert promtool("check", "rules", "--lint=all", "--lint-fatal", RULES.name) == ""


def test_the_rules_fire_when_they_should() -> None:
    assert promtool("test", "rules", RULE_TESTS.name) == ""


def test_promtool_reads_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(queries())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    assert promtool("check", "rules", str(file)) == ""


def test_panels_do_not_overlap_and_use_known_variables() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"], panel["title"]
    variables = {each["name"] for each in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    assert variables == LABELS
    used = {name for query in queries() for name in re.findall(r"\$(\w+)", query)}
    assert used - {"__rate_interval"} <= LABELS
    assert len({panel["id"] for panel in panels()}) == len(panels())

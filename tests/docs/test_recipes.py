"""The recipes of CONTRIBUTING.md: their files and names exist, and the scheduler in them works."""

from __future__ import annotations

import ast
import re

import pytest

from protocols.access import Category
from protocols.http import routes
from tests.docs.documents import ROOT, code_blocks, document, section

RECIPES = section(document("CONTRIBUTING.md"), "Recipes")
TITLES = re.findall(r"^### (.+)$", RECIPES, re.MULTILINE)

_STEP = re.compile(r"^\d\. `([^`]+)`(?: \(([^)]+)\))?: \S", re.MULTILINE)


def defined_names(text: str) -> set[str]:
    """Return what a module defines at its top."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


#: A file to open, and what to look for in it.
_TO_OPEN = re.compile(r"`([^`]+/[^`]+)`(?: \(`(\w+)`\))?")


def test_ten_questions_of_a_new_developer_need_at_most_five_files_each() -> None:
    rows = re.findall(
        r"^\| ([^|]+\?) \| (.+) \|$", section(document("CONTRIBUTING.md"), "Where to find what"), re.MULTILINE
    )
    assert len(rows) == 10
    for question, cell in rows:
        files = _TO_OPEN.findall(cell)
        assert 0 < len(files) <= 5, question
        for path, name in files:
            assert (ROOT / path).is_file(), path
            if path.endswith(".py") and not path.startswith("tests/"):
                assert name in defined_names((ROOT / path).read_text()), (path, name)


def test_there_is_a_recipe_for_what_is_added_most_often() -> None:
    added = " ".join(TITLES)
    for what in ("flag", "backend", "scheduler", "metric", "endpoint", "rule for configurations"):
        assert what in added


@pytest.mark.parametrize("title", TITLES)
def test_each_step_names_a_file_and_what_to_look_for_in_it(title: str) -> None:
    text = section(RECIPES, title)
    steps = _STEP.findall(text)
    assert len(steps) == len(re.findall(r"^\d\. ", text, re.MULTILINE)) >= 4
    for path, names in steps:
        assert (ROOT / path).exists(), path
        wanted = {name.strip(" `") for name in names.split(",") if names}
        if wanted:
            assert wanted - defined_names((ROOT / path).read_text()) == set(), path


def test_the_scheduler_of_the_recipe_passes_its_own_test() -> None:
    [block] = code_blocks(RECIPES, "python")
    names: dict[str, object] = {}
    exec(compile(block.text, "CONTRIBUTING.md", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        assert callable(test)
        test()


def test_an_endpoint_that_is_added_by_the_recipe_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = routes.Endpoint(Category.METADATA, {})
    monkeypatch.setitem(routes.LITERAL_ENDPOINTS, "/v2/added", endpoint)
    found = routes.find_endpoint("/v2/added")
    assert found is not None
    assert found[0] is endpoint

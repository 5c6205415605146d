"""Files and functions stay small, and their names and docstrings say what they are."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.architecture.source import PACKAGES, source_files

if TYPE_CHECKING:
    from tests.architecture.source import SourceFile

MAX_LINES = 600

#: Files with more lines, and why.
LONGER_FILES = {
    "backends/transport/wire.py": "the whole protocol stands in one file, nearly all of it declarations",
}

MAX_FUNCTION_LINES = 60

#: Names of modules that say nothing about what is in them.
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "base_classes"}


def path_of(file: SourceFile) -> str:
    return file.path


@pytest.mark.parametrize("file", source_files(), ids=path_of)
def test_files_and_functions_stay_small(file: SourceFile) -> None:
    if file.path not in LONGER_FILES:
        assert file.text.count("\n") <= MAX_LINES
    for node in ast.walk(file.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"


def test_files_that_may_be_longer_are() -> None:
    lengths = {file.path: file.text.count("\n") for file in source_files()}
    assert [path for path in LONGER_FILES if lengths[path] <= MAX_LINES] == []


@pytest.mark.parametrize("file", source_files(), ids=path_of)
def test_every_module_says_what_it_is(file: SourceFile) -> None:
    assert not file.tree.body or ast.get_docstring(file.tree), "no module docstring"


def test_no_name_of_a_module_is_empty_of_meaning() -> None:
    assert [file.path for file in source_files(*PACKAGES, "bench") if Path(file.path).stem in EMPTY_NAMES] == []

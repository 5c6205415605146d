"""Files and functions stay small, folders flat and short, and a name means one thing."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
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

#: Classes whose names others chose, so that another class of ours may have the same.
NAMES_OF_TRITON = {"backends/python/tensors.py": {"Tensor"}}

MAX_FUNCTION_LINES = 60
MAX_MODULES = 15

#: Folders with more modules, and why.
FULLER_FOLDERS = {
    "backends/python": "one module for each thing that Python models import, with Triton's names for them",
    "bench": "one module for each measurement, beside what they share; it is not installed",
    "kernel": "one module for each thing that all folders need, beside folders for their subjects",
    "kernel/cache": "one module for each kind of cache, for each step of a lookup, and for the form of entries",
    "protocols/http": "one module for each thing that all routes need, beside folders for their subjects",
    "kernel/config": "one module for each group of rules, and for each form that a configuration has",
    "kernel/repository": "one subject, from files to loaded versions, and the doubles of its tests",
}

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


def test_a_folder_has_few_modules() -> None:
    counts = Counter(
        str(Path(file.path).parent)
        for file in source_files(*PACKAGES, "bench")
        if not file.path.endswith("__init__.py")
    )
    full = {folder: count for folder, count in counts.items() if count > MAX_MODULES}
    assert full.keys() - FULLER_FOLDERS.keys() == set(), f"at most {MAX_MODULES} modules to a folder"
    assert FULLER_FOLDERS.keys() - full.keys() == set(), "these are not fuller any more"


def test_a_class_name_stands_for_one_class() -> None:
    places = defaultdict(list)
    for file in source_files(*PACKAGES, "bench"):
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef) and node.name not in NAMES_OF_TRITON.get(file.path, ()):
                places[node.name].append(f"{file.path}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}

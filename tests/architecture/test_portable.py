"""What a Python model's worker imports: it runs on the interpreters of models, and gives its names to their modules."""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from backends.environments.interpreter import OLDEST as OLDEST_OF_ENVIRONMENTS
from backends.portable.start import OLDEST
from tests.architecture.source import PACKAGES, ROOT, imports, planted, source_files

if TYPE_CHECKING:
    from tests.architecture.source import SourceFile

#: What `backends/portable/start.py` imports.
ENTRY = ("backends.worker.process", "backends.python.backend", "backends.portable.stand_in", "backends.portable.start")

#: What a worker has of the kernel: texts, rules, and pauses. Nothing that serves.
OF_THE_KERNEL = {
    "kernel", "kernel.errors", "kernel.loop", "kernel.loop.busy_poll", "kernel.loop.iteration_end", "kernel.machine",
    "kernel.naiad_module", "kernel.observe", "kernel.observe.limited_log", "kernel.observe.metric_rules",
    "kernel.records", "kernel.records.trace", "kernel.records.trace_context", "kernel.serving",
    "kernel.serving.validation", "kernel.texts", "kernel.version",
}  # fmt: skip

#: Functions that import later, and why no module of a model can come between.
LATE_IMPORTS = {
    "shm/tensor.py import_arrays": "`run_worker` calls it before there is a model",
    "backends/python/backend.py _import_model_class": "before the model's file is imported",
    "backends/portable/start.py _import_worker": "before there is a model",
    "backends/portable/start.py _has_msgspec": "before there is a model",
    "backends/portable/start.py find_spec": "of the standard library",
    "backends/registry.py entry_points_of": "of the standard library",
    # Found below the model's package, too (`backends/python/model_modules.py`), unless this has such a module itself.
    "backends/worker/region_messages.py _attach_device": "only for CUDA memory of clients, which few workers see",
    "backends/worker/loop.py _use_device": "only for instances on a GPU",
    "backends/worker/loop.py _tensors_on_device": "as above",
    "backends/worker/loop.py _device_batches": "as above",
    "backends/python/backend.py load": "as above",
    "backends/worker/devices/tensors.py as_numpy": "as `Tensor.as_numpy`",
    "shm/cuda.py copy_to_host": "the kernel imports the module, and no NumPy",
    "shm/cuda.py copy_from_host": "as above",
}

#: Names of the standard library that Python 3.9 does not have, and workers would like.
TOO_NEW = {"pairwise", "NoneType", "StrEnum", "ExceptionGroup", "TaskGroup", "tomllib", "Self", "assert_never", "UTC"}


#: The same of its modules.
TOO_NEW_IN_MODULES = {"asyncio.Runner", "asyncio.TaskGroup", "asyncio.timeout", "hashlib.file_digest", "datetime.UTC"}

#: Types of Python's own, which have no `|` on Python 3.9.
OWN_TYPES = {"str", "int", "float", "bool", "bytes", "list", "dict", "tuple", "object", "Callable"}


@functools.cache
def portable() -> tuple[SourceFile, ...]:
    """Return the files that a worker imports at run time, wherever in them."""
    files = {file.name.removesuffix(".__init__"): file for file in source_files(*PACKAGES)}
    found: dict[str, SourceFile] = {}
    waiting = list(ENTRY)
    while waiting:
        name = waiting.pop()
        if name in found or name not in files:
            continue
        found[name] = files[name]
        parents = name.split(".")[:-1]
        waiting += [".".join(parents[: count + 1]) for count in range(len(parents))]
        waiting += [each.module for each in imports(files[name]) if not each.for_types]
    return tuple(found.values())


def sides(node: ast.expr) -> list[ast.expr]:
    """Return what `|` joins in an expression; none for another expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*(sides(node.left) or [node.left]), *(sides(node.right) or [node.right])]
    return []


def all_sides(node: ast.expr) -> list[ast.expr]:
    """The same of all expressions in an expression."""
    return [side for each in ast.walk(node) if isinstance(each, ast.expr) for side in sides(each)]


def too_new(file: SourceFile) -> list[str]:
    """Return what Python 3.9 does not have in a file, as far as it can be seen."""
    found = []
    for_types = {
        id(node)
        for branch in ast.walk(file.tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(file.tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Call) and any(word.arg == "strict" for word in node.keywords):
            found.append(f"{file.path}:{node.lineno}: zip(strict)")
        # Structs have a `|` on each Python (`StructMeta.__or__`).
        if isinstance(node, ast.Assign) and {ast.unparse(side) for side in all_sides(node.value)} & OWN_TYPES:
            found.append(f"{file.path}:{node.lineno}: a union at run time")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in TOO_NEW_IN_MODULES:
            found.append(f"{file.path}:{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{file.path}:{node.lineno}: {each.name}" for each in node.names if each.name in TOO_NEW]
    return found


def test_a_worker_imports_of_the_kernel_only_what_serves_nothing() -> None:
    names = {file.name.removesuffix(".__init__") for file in portable()}
    assert len(names) > 60, "the way of imports was lost"
    assert {name for name in names if name.partition(".")[0] == "kernel"} <= OF_THE_KERNEL
    assert {name.partition(".")[0] for name in names} == {"backends", "kernel", "shm"}


def test_a_worker_needs_only_numpy_and_what_stands_in_for_msgspec() -> None:
    foreign = {found.module.partition(".")[0] for file in portable() for found in imports(file) if not found.for_types}
    assert foreign - sys.stdlib_module_names - {*PACKAGES} == {"numpy", "msgspec"}


def test_the_code_of_workers_has_the_syntax_of_the_oldest_python() -> None:
    assert OLDEST == OLDEST_OF_ENVIRONMENTS
    for file in portable():
        ast.parse(file.text, feature_version=OLDEST)
    assert [place for file in portable() for place in too_new(file)] == []


def test_what_is_too_new_is_found() -> None:
    assert len(too_new(planted("zip(a, b, strict=True)"))) == 1
    assert len(too_new(planted("Value = str | int"))) == 1
    assert len(too_new(planted("Values = tuple[str | int, ...]"))) == 1
    assert too_new(planted("Message = Hello | Loaded")) == []
    assert len(too_new(planted("from enum import StrEnum"))) == 1
    assert len(too_new(planted("asyncio.Runner()"))) == 1
    assert too_new(planted("flags = MSG_A | MSG_B")) == []
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n    case 1: ...", feature_version=OLDEST)


def test_ruff_checks_the_code_of_workers_for_the_oldest_python() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        versions: dict[str, str] = tomllib.load(file)["tool"]["ruff"]["per-file-target-version"]
    assert set(versions.values()) == {"py39", "py37"}


def test_a_worker_imports_nothing_of_ours_by_name_when_it_has_a_model() -> None:
    found = {
        f"{file.path} {node.name}"
        for file in portable()
        for node in ast.walk(file.tree)
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, (ast.Import, ast.ImportFrom))
    }
    assert found - LATE_IMPORTS.keys() == set()
    assert LATE_IMPORTS.keys() - found == set()

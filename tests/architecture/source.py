"""The project's own source as syntax trees: its modules, what they import, and which function a line is in."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[2]

#: The packages that are installed.
PACKAGES = ("shm", "kernel", "schedulers", "backends", "protocols")

#: Written by a generator, or models that workers load: none of our rules is for them.
_NOT_OURS = ("generated", "demo")


class SourceFile(NamedTuple):
    """One module: its path from the root of the repository, its dotted name and its text."""

    path: str
    name: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder that it is in, as "kernel/serving"; the module itself where it stands at the top of a package."""
        parts = Path(self.path).parts
        return "/".join(parts[:2]).removesuffix(".py")


class Import(NamedTuple):
    """One name that a module imports, as far as modules are concerned: "kernel.errors" for `ServingError` in it."""

    module: str
    for_types: bool
    line: int


def source_files(*packages: str) -> tuple[SourceFile, ...]:
    """Return the modules of our packages, or those of `packages`, sorted by path."""
    return tuple(file for package in packages or PACKAGES for file in _source_files(package))


@functools.cache
def _source_files(package: str) -> tuple[SourceFile, ...]:
    """Return the modules of a package. They stay, and are frozen.

    The trees have a million nodes: to walk through them, each collection of garbage would hold the interpreter's lock
    for one to three seconds, in which no other test of the process goes on and no time limit is looked at.
    """
    found = tuple(
        SourceFile(name, name.removesuffix(".py").removesuffix("/__init__").replace("/", "."), text, ast.parse(text))
        for path in sorted((ROOT / package).rglob("*.py"))
        if not set(_NOT_OURS) & set(path.parts)
        for name, text in [(str(path.relative_to(ROOT)), path.read_text())]
    )
    gc.freeze()
    return found


def planted(text: str, path: str = "kernel/planted.py") -> SourceFile:
    """Return a module that is not there, to see what a rule says of it."""
    return SourceFile(path, path.removesuffix(".py").replace("/", "."), text, ast.parse(text))


@functools.cache
def names_of_modules() -> frozenset[str]:
    """Return the dotted names of all our modules and packages, those of bench too."""
    return frozenset(file.name for file in (*source_files(), *source_files("bench")))


@functools.cache
def imports(file: SourceFile) -> tuple[Import, ...]:
    """Return what `file` imports, anywhere in it: at its top, inside functions, and for types only."""
    found: list[Import] = []

    def walk(nodes: Iterable[ast.AST], for_types: bool) -> None:
        for node in nodes:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                walk(node.body, True)
                walk(node.orelse, for_types)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found.extend(Import(module, for_types, node.lineno) for module in _modules(node, file.path))
            elif not isinstance(node, ast.expr):
                walk(ast.iter_child_nodes(node), for_types)

    walk(file.tree.body, False)
    return tuple(found)


def _modules(node: ast.Import | ast.ImportFrom, path: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert not node.level, f"{path}:{node.lineno}: imports are absolute"
    assert node.module
    within = [f"{node.module}.{alias.name}" for alias in node.names]
    return list(dict.fromkeys(name if name in names_of_modules() else node.module for name in within))


def room_of(module: str) -> str:
    """Return the room of one of our modules by its dotted name; see `SourceFile.room`."""
    return "/".join(module.split(".")[:2])


def within_functions(file: SourceFile) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node with the qualified name of the function or class that it is in, "" for the module itself."""

    def walk(node: ast.AST, outer: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            yield outer, child
            inner = outer
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{outer}.{child.name}".lstrip(".")
            yield from walk(child, inner)

    return walk(file.tree, "")

"""Figures of the tree: how its parts hang together, and how large it is.

    python -m tests.architecture.figures            the figures
    python -m tests.architecture.figures --places   with the places that each one counts

They show whether a change has made the tree simpler.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections import defaultdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from tests.architecture.source import PACKAGES, imports, names_of_modules, source_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tests.architecture.source import SourceFile

#: What builds the server from its parts may import everything, and the start imports it.
_ROOTS = {"kernel.app", "kernel.start"}

#: The modules with the kernel object and the models.
_KERNEL_OBJECTS = {"kernel.serving.kernel", "kernel.serving.model"}

#: A method of an object or class gets another value: mypy refuses that, unless a comment allows it.
_ALLOWED_REPLACEMENT = re.compile(r"# type: ignore\[(method-assign|attr-defined)\]")

#: What front doors call on the way of an inference request.
_SUBMITS = {"submit"}
_RESOLVES = {"resolve", "resolve_unary"}


#: What replaces something for a test: pytest's fixture, and what stands for it where there are several.
_PATCHES = {"setattr", "delattr", "setitem"}


class Figure(NamedTuple):
    """A number, and what it counts."""

    title: str
    number: int
    #: One line for each thing that is counted, if that helps.
    places: Sequence[str] = ()


def figures() -> list[Figure]:
    """Return all figures of the tree."""
    files = source_files()
    circles = circles_with_types(files)
    return [
        _listed("methods of our objects that are replaced at run time", replaced_methods(files)),
        _listed("modules of protocols that import the kernel object or a model", importers_of_the_kernel(files)),
        _listed("places in protocols that submit a request", callers(files, _SUBMITS)),
        _listed("places in protocols that resolve a model for a request", callers(files, _RESOLVES)),
        _listed("pairs of folders that import each other at run time", mutual_folders(files)),
        _listed("circles of modules, imports for types included", [", ".join(each) for each in circles]),
        Figure("modules in the largest of these circles", max(map(len, circles), default=0)),
        _listed(
            "reads of private names of the product in tests", private_reads(source_files("tests"), private_names())
        ),
        _listed("patches of private names in tests", private_patches(source_files("tests"))),
        _listed("imports of a test module in tests", imports_of_tests(source_files("tests"))),
        Figure("modules", len(files)),
        Figure("folders with modules", len({_folder(file.name) for file in files})),
        Figure("statements", sum(isinstance(node, ast.stmt) for file in files for node in ast.walk(file.tree))),
    ]


def _listed(title: str, places: Iterable[str]) -> Figure:
    found = list(places)
    return Figure(title, len(found), found)


def replaced_methods(files: Iterable[SourceFile]) -> Iterator[str]:
    """Yield the places where a method of an object or a class of ours is replaced."""
    for file in files:
        lines = file.text.splitlines()
        foreign = {found.module for found in imports(file) if found.module.partition(".")[0] not in PACKAGES}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                yield f"{file.path}:{node.lineno}: {ast.unparse(node)}"
            if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and _ALLOWED_REPLACEMENT.search(lines[node.lineno - 1]):
                    name = ast.unparse(target)
                    if name.partition(".")[0] not in foreign:
                        yield f"{file.path}:{node.lineno}: {name}"


@functools.cache
def private_names() -> frozenset[str]:
    """Return the private names that the product or bench defines: of functions, classes, constants and attributes."""
    found: set[str] = set()
    for file in (*source_files(), *source_files("bench")):
        for node in ast.walk(file.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return frozenset(filter(_is_private, found))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_reads(files: Iterable[SourceFile], names: frozenset[str]) -> Iterator[str]:
    """Yield the places where a private name of the product is used from outside: one of `names`, not of `self`.

    Tests of the internals of a library use names of that library.
    """
    for file in files:
        if file.path.endswith("_internals.py"):
            continue
        foreign = {found.module for found in imports(file) if found.module.partition(".")[0] not in PACKAGES}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Attribute) and node.attr in names:
                if ast.unparse(node.value).partition(".")[0] not in {"self", "cls", *foreign}:
                    yield f"{file.path}:{node.lineno}: {ast.unparse(node)}"
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{file.path}:{node.lineno}: {each.name}" for each in node.names if each.name in names)


def private_patches(files: Iterable[SourceFile]) -> Iterator[str]:
    """Yield the places where a test gives a private name another value, by pytest's `monkeypatch`."""
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PATCHES:
                words = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
                if any(isinstance(word, str) and any(map(_is_private, word.split("."))) for word in words):
                    yield f"{file.path}:{node.lineno}: {ast.unparse(node)}"


def imports_of_tests(files: Iterable[SourceFile]) -> Iterator[str]:
    """Yield the places that import from a module of tests: what two of them need is in a module of its own."""
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "tests":
                modules = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                if any(module.rpartition(".")[2].startswith("test_") for module in modules):
                    yield f"{file.path}:{node.lineno}: {node.module}"


def importers_of_the_kernel(files: Iterable[SourceFile]) -> Iterator[str]:
    """Yield the modules of `protocols` that import the kernel object or a model, also for types. Test doubles may."""
    for file in files:
        if file.path.startswith("protocols/") and not file.path.endswith("/testing.py"):
            found = _KERNEL_OBJECTS & {each.module for each in imports(file)}
            if found:
                yield f"{file.path}: {', '.join(sorted(found))}"


def callers(files: Iterable[SourceFile], names: set[str]) -> Iterator[str]:
    """Yield the places in `protocols` that call a method of the kernel with one of these names."""
    for file in files:
        if not file.path.startswith("protocols/"):
            continue
        for node in ast.walk(file.tree):
            # Of the kernel, wherever it is stored, and also where the method is named to be called later.
            if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Load):
                holder = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
                if holder in ("kernel", "door", "intake", "service"):
                    yield f"{file.path}:{node.lineno}: {ast.unparse(node)}"


def mutual_folders(files: Iterable[SourceFile]) -> list[str]:
    """Return the pairs of folders with modules that import modules of the other one at run time.

    A folder and one inside it are no such pair, and what builds the server does not count.
    """
    edges: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in files:
        for found in imports(file):
            if not (found.for_types or _ROOTS & {file.name, found.module}) and found.module in names_of_modules():
                edges[_folder(file.name), _folder(found.module)].add(f"{file.name} → {found.module}")
    return [
        f"{one} and {other}: {', '.join(sorted(edges[one, other]))}; {', '.join(sorted(edges[other, one]))}"
        for one, other in sorted(edges)
        if one < other and (other, one) in edges and not other.startswith(f"{one}/")
    ]


def circles_with_types(files: Iterable[SourceFile]) -> list[list[str]]:
    """Return the sets of modules that reach each other by imports, largest first. Imports for types count."""
    graph = {file.name: {found.module for found in imports(file)} for file in files}
    connected = _strongly_connected({name: sorted(found & graph.keys()) for name, found in graph.items()})
    return sorted((sorted(each) for each in connected if len(each) > 1), key=lambda each: (-len(each), each))


def _strongly_connected(graph: Mapping[str, Sequence[str]]) -> list[set[str]]:
    """Return the strongly connected components of a graph, by Kosaraju's two passes."""
    order: list[str] = []
    _visit(graph, graph, order.append)
    back: dict[str, list[str]] = {name: [] for name in graph}
    for name, found in graph.items():
        for each in found:
            back[each].append(name)
    components: list[set[str]] = []
    seen: set[str] = set()
    for name in reversed(order):
        if name not in seen:
            component: set[str] = set()
            _visit(back, [name], component.add, seen)
            components.append(component)
    return components


def _visit(
    graph: Mapping[str, Sequence[str]],
    begins: Iterable[str],
    left: Callable[[str], object],
    seen: set[str] | None = None,
) -> None:
    """Call `left` for each node that can be reached and was not seen, after all that can be reached from it."""
    seen = set() if seen is None else seen
    for begin in begins:
        if begin in seen:
            continue
        seen.add(begin)
        way = [(begin, iter(graph[begin]))]
        while way:
            node, rest = way[-1]
            following = next((each for each in rest if each not in seen), None)
            if following is None:
                way.pop()
                left(node)
            else:
                seen.add(following)
                way.append((following, iter(graph[following])))


@functools.cache
def _folder(module: str) -> str:
    """Return the folder of a module of ours: `kernel/serving` for `kernel.serving.kernel` and for the package."""
    path = PurePosixPath(module.replace(".", "/"))
    return str(path if module in _packages() else path.parent)


@functools.cache
def _packages() -> frozenset[str]:
    return frozenset(file.name for file in source_files() if file.path.endswith("/__init__.py"))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Print figures of the tree.")
    parser.add_argument("--places", action="store_true", help="print the places that each figure counts, too")
    arguments = parser.parse_args()
    lines: list[str] = []
    for figure in figures():
        lines.append(f"{figure.number:6}  {figure.title}")
        if arguments.places:
            lines += (f"          {place}" for place in figure.places)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

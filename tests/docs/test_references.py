"""What documents, docstrings and comments name exists: paths, modules, links, flags, commands."""

from __future__ import annotations

import ast
import functools
import io
import re
import shlex
import tokenize
from typing import TYPE_CHECKING

import pytest
import typer.main

from backends.hosts.__main__ import cli as host_agent
from backends.tensorrt.building.command import command as build_engine
from bench.__main__ import cli as bench_cli
from kernel.flags.read import FLAGS, read_flags
from kernel.tools.cli import cli
from kernel.tools.traffic import rollout_cli
from tests.docs.documents import ALL_DOCUMENTS, DOCUMENTS, ROOT, anchors, document, links, name_of, section

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FOLDERS = "kernel|protocols|schedulers|backends|shm|tests|bench|docs"
_PATH = re.compile(rf"(?<![\w./*-])(?:{_FOLDERS})/[\w./*-]*[\w/*]")
_DOCUMENT = re.compile(r"(?<![\w/.*-])[\w./-]+\.md\b")
_MODULE = re.compile(rf"`((?:{_FOLDERS})(?:\.\w+)+)`")

#: Flags of other programs that documents name.
FLAGS_OF_OTHERS = {
    "--against", "--check", "--force-reinstall", "--help", "--json", "--model", "--no-deps", "--only", "--output",
    "--health-cmd", "--ipc", "--no-cache-dir", "--read-only", "--rm", "--shm-size", "--stop-timeout",  # docker, pip
    "--tmpfs",
    "--address", "--head", "--port",  # ray
    "--concurrency-range", "--input-data", "--input-tensor-format", "--measurement-interval",  # perf_analyzer
    "--output-shared-memory-size", "--percentile", "--request-distribution", "--request-rate-range",
    "--stability-percentage",
    "--perfetto", "--quick", "--randomly-seed", "--record", "--rounds", "--seed", "--seeds", "--show-trace",
    "--full", "--minutes", "--seconds", "--story", "--strict", "--svg", "--timeout", "--without-triton",
}  # fmt: skip

SOURCES = [
    path
    for folder in _FOLDERS.split("|")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "generated" not in path.parts and "models" not in path.parts
]


def wrong_paths(text: str) -> list[str]:
    """Return the paths in `text` that do not exist. A pattern must match something."""
    return [path for path in _PATH.findall(text) if not exists(path.rstrip("/"))]


@functools.cache
def exists(pattern: str) -> bool:
    return any(ROOT.glob(pattern)) if set(pattern) & set("*?[") else (ROOT / pattern).exists()


def wrong_documents(text: str) -> list[str]:
    """Return the documents that `text` names, from the root of the repository, and that do not exist."""
    return [name for name in _DOCUMENT.findall(text) if not (ROOT / name).is_file()]


def wrong_modules(text: str) -> list[str]:
    """Return the dotted names in backticks in `text` that are no module of ours and nothing in one."""
    return [name for name in _MODULE.findall(text) if not is_module_or_in_one(name)]


def wrong_names(text: str) -> list[str]:
    """Return what `text` names and does not exist."""
    return wrong_paths(text) + wrong_documents(text) + wrong_modules(text)


def is_module_or_in_one(name: str) -> bool:
    path, attribute = ROOT, ""
    for part in name.split("."):
        if attribute:  # of a class
            return True
        if (path / part).is_dir() or (path / f"{part}.py").is_file():
            path /= part
        else:
            attribute = part
    return not attribute or attribute in names_in(path)


@functools.cache
def names_in(path: Path) -> set[str]:
    """Return the names that a module defines or imports at its top; `path` is without suffix."""
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body if file.is_file() else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return found


def explanations(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@pytest.mark.parametrize("path", [path for path in ALL_DOCUMENTS if path.name != "CHANGELOG.md"], ids=name_of)
def test_every_path_that_a_document_names_exists(path: Path) -> None:
    """The changelog may name what is gone."""
    assert wrong_paths(path.read_text()) == []
    assert wrong_modules(path.read_text()) == []


def test_every_path_that_source_names_in_docstrings_and_comments_exists() -> None:
    wrong = [
        f"{name_of(path)}: {found}"
        for path in SOURCES
        if wrong_names(path.read_text())  # few: to take a module apart takes far longer
        for text in explanations(path)
        for found in wrong_names(text)
    ]
    assert wrong == []


def test_names_that_are_wrong_are_found() -> None:
    assert wrong_paths("`kernel/app.py`, `kernel/nothing.py`, tests/docs/test_*.py") == ["kernel/nothing.py"]
    assert wrong_documents("see design.md, bench/README.md and README.md.") == ["design.md"]
    assert wrong_modules("`kernel.app`, `kernel.app.Server.run`, `kernel.app.Nothing`") == ["kernel.app.Nothing"]


@pytest.mark.parametrize("path", ALL_DOCUMENTS, ids=name_of)
def test_every_link_works(path: Path) -> None:
    wrong = []
    for link in links(path.read_text()):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or not file.is_relative_to(ROOT) or (anchor and anchor not in anchors(file.read_text())):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("path", ALL_DOCUMENTS, ids=name_of)
def test_every_link_with_a_name_leads_to_a_file_that_defines_it(path: Path) -> None:
    """The site links such a name to its line."""
    named = re.findall(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)", path.read_text())
    wrong = [
        f"{target}: {name}" for name, target in named if name not in definitions_in((path.parent / target).resolve())
    ]
    assert wrong == []


@functools.cache
def definitions_in(file: Path) -> set[str]:
    """Return the functions and classes of a module, and `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_flag_that_a_document_names_exists(path: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", path.read_text()))
    assert named - {f"--{name}" for name in FLAGS} - options_of(cli) - FLAGS_OF_OTHERS == set()


def test_every_flag_that_triton_does_not_have_is_documented() -> None:
    text = section(document("docs/flags-and-logs.md"), "Flags")
    ours = {flag.name for flag in FLAGS.values() if flag.ours}
    assert {name for name in ours if f"`--{name}`" not in text} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_command_line_of_the_server_is_accepted(path: Path) -> None:
    for lines in re.findall(r"^(?: {4})?naiad (?:run|tritonserver) ((?:.*\\\n)*.*)$", path.read_text(), re.MULTILINE):
        words = lines.partition("  #")[0].replace("\\\n", " ")
        if "--help" not in words:
            read_flags(shlex.split(words), {})


@pytest.mark.parametrize("path", ALL_DOCUMENTS, ids=name_of)
def test_every_command_that_a_document_names_exists(path: Path) -> None:
    text = path.read_text()
    targets = set(re.findall(r"^([a-z]+):", document("Makefile"), re.MULTILINE))
    # Only in code: "make" is a word as well.
    named = set(re.findall(r"(?:`|^    )make ([a-z]+)", text, re.MULTILINE))
    assert named - targets == set()
    for program, commands in (("kernel", commands_of(cli)), ("bench", commands_of(bench_cli))):
        assert set(re.findall(rf"python -m {program} ([a-z]+)", text)) - commands == set()
    assert set(re.findall(r"^    naiad ([a-z]+)", text, re.MULTILINE)) - commands_of(cli) == set()


def options_of(program: typer.Typer) -> set[str]:
    """Return the options of all commands of a command line, and those of commands of another process."""
    groups = [typer.main.get_group(program), typer.main.get_group(rollout_cli)]
    commands = [each for group in groups for each in group.commands.values()]
    commands += [typer.main.get_command(build_engine), typer.main.get_command(host_agent)]
    return {name for command in commands for parameter in command.params for name in parameter.opts}


def commands_of(program: typer.Typer) -> set[str]:
    """Return the names of the commands of a command line."""
    group = typer.main.get_group(program)
    return set(group.commands)

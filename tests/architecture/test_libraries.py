"""What other projects promise is used anywhere; what they do not promise stands in one module for each of them."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from typing import TYPE_CHECKING, Any

import pytest

from tests.architecture.source import PACKAGES, ROOT, SourceFile, imports, planted, source_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

with (ROOT / "pyproject.toml").open("rb") as _file:
    PYPROJECT: dict[str, Any] = tomllib.load(_file)

#: Modules that belong to no distribution: what a worker offers to models, what a test's models have beside them, and
#: what stands for another project's package (`tests/fake_vllm`).
NO_DISTRIBUTION = {"triton_python_backend_utils", "loader", "lab_above", "lab_beside", "vllm"}

#: Modules of distributions with another name that are not installed for `make test`.
NAMED_OTHERWISE = {"mlflow": "mlflow-skinny"}

#: Our public module, in `kernel/importable`.
PUBLIC_MODULE = "naiad"

#: Dependencies that none of our modules imports, and who does.
IMPORTED_BY_OTHERS = {"uvloop": "anyio"}

#: Libraries whose inside we use: where, and what other modules may import of them.
INTERNALS = {
    "aiohttp": ("protocols/http/aiohttp_internals.py", {"aiohttp", "aiohttp.abc"}),
    "grpclib": (
        "protocols/grpc/grpclib_internals.py",
        # Of grpclib.server the type of a handler's stream alone; what is in grpclib.const, generated code uses. The
        # client and its configuration are documented.
        {"grpclib.client", "grpclib.config", "grpclib.const", "grpclib.exceptions", "grpclib.server"},
    ),
    # For grpclib, which raises and catches an error of it. What is documented, front doors use for calls.
    "h2": (
        "protocols/grpc/grpclib_internals.py",
        {"h2.config", "h2.connection", "h2.errors", "h2.events", "h2.exceptions", "h2.settings"},
    ),
    "torch": ("backends/pytorch/library.py", {"torch", "torch.export.passes"}),
}

#: Beside those: this one knows which modules define what `aiohttp.web` offers.
WEB = "protocols/http/web.py"

#: Classes that are made to be derived from.
BASE_CLASSES = {"AbstractAccessLogger"}

#: Private attributes of others that are used all the same, and why.
FRIENDS = {
    "os._exit": "documented, in spite of its name",
    "tensor._name": "a tensor of the Python backend in a request of it: for every input of every request",
    "inference_response._output_tensors": "the same of a response: for every output of every call of another model",
}

#: What is public by its name alone: no documentation has it.
UNDOCUMENTED = {"output_size", "total_bytes", "feed_eof", "set_exception"}


def internals_used(file: SourceFile) -> list[str]:
    """Return what `file` uses of a library's inside, though another module is there for that."""
    found: list[str] = []
    if file.path == WEB:
        return found
    libraries = {name for name, (place, _) in INTERNALS.items() if file.path != place}
    for imported in imports(file):
        library = imported.module.partition(".")[0]
        if library in libraries and imported.module not in INTERNALS[library][1]:
            found.append(f"{file.path}:{imported.line}: {imported.module}")
        if imported.module == "grpclib.server" and library in libraries and not imported.for_types:
            found.append(f"{file.path}:{imported.line}: {imported.module} not for types only")
    if libraries != INTERNALS.keys():
        return found
    of_aiohttp = file.path.startswith("protocols/http/")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ClassDef) and of_aiohttp:
            bases = {ast.unparse(base) for base in node.bases}
            derived = {base for base in bases if base.startswith("web.")} | bases & _names_of(file, "aiohttp")
            found += [f"{file.path}:{node.lineno}: {base} as a base class" for base in derived - BASE_CLASSES]
        elif isinstance(node, ast.Attribute) and of_aiohttp and node.attr in UNDOCUMENTED:
            found.append(f"{file.path}:{node.lineno}: {ast.unparse(node)}")
    return found


def _names_of(file: SourceFile, library: str) -> set[str]:
    """Return the names that `file` imports out of a library."""
    return {
        alias.asname or alias.name
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == library
        for alias in node.names
    }


def private_attributes(file: SourceFile) -> list[str]:
    """Return where `file` uses a private attribute of an object whose class is defined elsewhere."""
    own = {
        name
        for node in ast.walk(file.tree)
        for name in (
            [node.name]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            else [node.attr]
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            else [node.target.id]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            else []
        )
    }
    return [
        f"{file.path}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in {"self", "cls"}
        and node.attr not in own
        and ast.unparse(node) not in FRIENDS
    ]


def test_the_inside_of_a_library_is_used_in_one_module() -> None:
    assert [place for file in source_files() for place in internals_used(file)] == []


def test_private_attributes_are_used_where_their_class_is_defined() -> None:
    seams = {place for place, _ in INTERNALS.values()}
    files = [file for file in source_files(*PACKAGES, "bench") if file.path not in seams]
    assert [place for file in files for place in private_attributes(file)] == []


def test_no_private_name_is_imported() -> None:
    seams = {place for place, _ in INTERNALS.values()}
    found = [
        f"{file.path}:{node.lineno}: {alias.name}"
        for file in source_files(*PACKAGES, "bench")
        if file.path not in seams
        for node in ast.walk(file.tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if any(part.startswith("_") and not part.startswith("__") for part in alias.name.split("."))
    ]
    assert found == []


def test_uses_of_a_librarys_inside_are_found() -> None:
    for text in (
        "from aiohttp.http_parser import RawRequestMessage",
        "class Connection(web.RequestHandler): ...",
        "from aiohttp import StreamReader\nclass Body(StreamReader): ...",
        "http.writer.output_size = 0",
        "content.feed_eof()",
        "import h2.stream",
        "from grpclib.server import request_handler",
    ):
        assert len(internals_used(planted(text, "protocols/http/planted.py"))) == 1, text
    assert internals_used(planted("class Log(AbstractAccessLogger): ...", "protocols/http/planted.py")) == []
    assert private_attributes(planted("def f(stream):\n    stream._stream")) == ["kernel/planted.py:2: stream._stream"]
    own = "class C:\n    def f(self, other):\n        self._a = other._a"
    assert private_attributes(planted(own)) == []


# ---- what is declared ------------------------------------------------------------------------


def names(requirements: Iterable[Any]) -> set[str]:
    """Return the normalized names of distributions in a list of requirements."""
    found = (re.match(r"[\w.-]+", each) for each in requirements if isinstance(each, str))
    return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match}


def foreign_modules(*packages: str) -> set[str]:
    """Return the top-level modules of other projects that are imported, wherever in a file."""
    modules = {found.module.partition(".")[0] for file in source_files(*packages) for found in imports(file)}
    return modules - sys.stdlib_module_names - {*PACKAGES, PUBLIC_MODULE, "bench", "tests"} - NO_DISTRIBUTION


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions(module: str) -> set[str]:
    """Return the distributions that have a module of this name; the name itself if it is not installed (extras)."""
    return names(_distributions().get(module, [NAMED_OTHERWISE.get(module, module)]))


def declared() -> set[str]:
    """Return what is installed with the server, or with one of its extras, or to build it."""
    extras: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
    always = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["build-system"]["requires"]]
    return names([*always, *(each for extra in extras.values() for each in extra)])


def test_what_the_server_imports_is_declared() -> None:
    allowed = declared()
    assert {module for module in foreign_modules(*PACKAGES) if not distributions(module) & allowed} == set()


def test_what_tests_and_measurements_import_is_declared() -> None:
    groups: dict[str, list[Any]] = PYPROJECT["dependency-groups"]
    allowed = declared() | names(each for group in groups.values() for each in group)
    assert {module for module in foreign_modules("bench", "tests") if not distributions(module) & allowed} == set()


def test_every_dependency_is_imported() -> None:
    imported = {name for module in foreign_modules(*PACKAGES) for name in distributions(module)}
    assert names(PYPROJECT["project"]["dependencies"]) - imported == IMPORTED_BY_OTHERS.keys()


@pytest.mark.parametrize("library", INTERNALS)
def test_a_library_whose_inside_is_used_has_an_upper_bound(library: str) -> None:
    extras: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
    requirements = [*PYPROJECT["project"]["dependencies"], *(each for extra in extras.values() for each in extra)]
    [requirement] = [each for each in requirements if names([each]) == {library}]
    assert "<" in requirement

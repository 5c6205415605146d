"""The documents as a site (`make docs`), as far as it can be checked without the packages that build it."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from typing import TYPE_CHECKING, Any

import msgspec
import naiad
import naiad.testing
import pytest

from kernel.errors import ErrorCode
from protocols.status import GRPC_STATUS, HTTP_STATUS
from tests.docs.documents import ALL_DOCUMENTS, ROOT, name_of, table

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from kernel.errors import ServingError

REFERENCE = ROOT / "docs" / "reference"
DRAWINGS = sorted((ROOT / "docs" / "drawings").glob("*.toml"))

_DIRECTIVE = re.compile(r"( *)\.\. (currentmodule|auto\w+|py:data):: ([\w.]+)(?:\(([\w, ]*)\))?")
_OPTION = re.compile(r"   :([\w-]+):(.*)")


def loaded(path: Path) -> ModuleType:
    """Return a module of the site, which is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the order of the pages ------------------------------------------------------------------


def test_each_document_is_at_one_place_of_the_navigation() -> None:
    navigation = loaded(ROOT / "docs" / "site" / "navigation.py").NAVIGATION
    listed = [page for parts in navigation.values() for _, pages in parts for page in pages]
    documents = {name_of(path).removesuffix(".md") for path in [*ALL_DOCUMENTS, ROOT / "bench" / "gpu" / "README.md"]}
    assert sorted(listed) == sorted(documents - {"README"})


# ---- the built site --------------------------------------------------------------------------


def test_links_anchors_and_resources_of_a_built_site_are_checked(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "style.css").write_text("@import 'https://fonts.example/css'; a { background: url(data:image/png) }")
    (tmp_path / "index.html").write_text(
        """<h1 id="top">A</h1> <link href="style.css"> <a href="#top"></a> <a href="folder/page.html#part"></a>
        <a href="https://example.com"></a> <a href="#gone"></a> <a href="gone.html"></a>
        <script src="https://cdn.example/script.js"></script>"""
    )
    (tmp_path / "folder" / "page.html").write_text('<p id="part"><a href="../index.html#bottom"></a></p>')
    assert loaded(ROOT / "docs" / "site" / "check.py").problems(tmp_path) == [
        "folder/page.html: ../index.html#bottom: the page has no such anchor",
        "index.html: #gone: the page has no such anchor",
        "index.html: gone.html: there is no such file",
        "index.html: https://cdn.example/script.js: is loaded from elsewhere",
        "style.css: https://fonts.example/css: is loaded from elsewhere",
    ]


# ---- drawings --------------------------------------------------------------------------------


@pytest.mark.parametrize("source", DRAWINGS, ids=lambda path: path.name)
def test_each_drawing_is_what_its_source_makes(source: Path) -> None:
    """Otherwise `make drawings` has to be run."""
    drawn = loaded(ROOT / "docs" / "drawings" / "draw.py").draw(source.read_text())
    assert source.with_suffix(".svg").read_text() == drawn


def test_a_text_that_does_not_fit_into_its_box_is_refused() -> None:
    draw = loaded(ROOT / "docs" / "drawings" / "draw.py").draw
    box = 'title = "t"\nwidth = 100\nheight = 50\narrow = []\n[[box]]\nkind = "part"\nat = [0, 0, 100, 50]\n'
    assert "<tspan" in draw(f'{box}lines = ["short"]')
    with pytest.raises(ValueError, match="has 72"):
        draw(f'{box}lines = ["a text that is far too long"]')


# ---- the reference ---------------------------------------------------------------------------


class Entry(msgspec.Struct):
    """What a directive of the reference documents."""

    module: str
    name: str
    #: Fields or parameters, where the page names them.
    arguments: list[str]
    #: Members by name; None for all public ones except for `excluded`, empty for a function.
    members: list[str] | None
    excluded: list[str]

    @property
    def value(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


def entries_of(text: str) -> list[Entry]:
    """Return what a page documents."""
    found: list[Entry] = []
    module = ""
    for line in text.splitlines():
        if match := _DIRECTIVE.fullmatch(line):
            indent, directive, name, arguments = match.groups()
            if directive == "currentmodule":
                module = name
            elif indent:  # a member of the one before
                assert found[-1].members is not None
                found[-1].members.append(name)
            else:
                found.append(Entry(module, name, names_in(arguments or ""), [], []))
        elif match := _OPTION.fullmatch(line):
            option, value = match.groups()
            if option == "members":
                found[-1].members = names_in(value) or None
            elif option == "exclude-members":
                found[-1].excluded = names_in(value)
    return found


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


ENTRIES = [entry for page in sorted(REFERENCE.glob("*.md")) for entry in entries_of(page.read_text())]
CLASSES = [entry for entry in ENTRIES if isinstance(entry.value, type)]


def test_each_name_that_stays_is_in_the_reference_once() -> None:
    for module in (naiad, naiad.testing):
        listed = [entry.name for entry in ENTRIES if entry.module == module.__name__]
        assert sorted(listed) == sorted(module._MODULES)


def test_what_the_reference_names_exists() -> None:
    assert len(ENTRIES) > 60
    wrong: list[str] = []
    for entry in ENTRIES:
        fields = documented_fields(entry.value) if isinstance(entry.value, type) else {}
        members = entry.members or ()
        wrong += [f"{entry.name}.{name}" for name in members if not (name in fields or hasattr(entry.value, name))]
        wrong += [f"{entry.name}({name})" for name in entry.arguments if name not in fields]
        wrong += [f"{entry.name}, without {name}" for name in entry.excluded if name not in fields]
    assert wrong == []


def test_everything_that_the_reference_shows_has_an_explanation() -> None:
    """Fields may be explained by the docstring of their class."""
    thin = [entry.name for entry in ENTRIES if entry.name != "__version__" and not entry.value.__doc__]
    for entry in CLASSES:
        fields = documented_fields(entry.value)
        members = {name: bool(inspect.getdoc(member)) for name, member in functions_of(entry.value).items()}
        shown = entry.members
        if shown is None:
            shown = [name for name in {**fields, **members} if not name.startswith("_") and name not in entry.excluded]
        of_class = set(re.findall(r"\w+", entry.value.__doc__ or ""))
        thin += [
            f"{entry.name}.{name}"
            for name in shown
            if not (fields.get(name) or members.get(name) or (name in fields and name in of_class))
        ]
    assert thin == []


def test_the_table_of_errors_is_that_of_the_server() -> None:
    rows = table((REFERENCE / "errors.md").read_text())
    assert len(rows) == len(ErrorCode)
    for name, http, grpc in rows:
        error: type[ServingError] = getattr(naiad, name.strip("`"))
        assert [http, grpc] == [str(HTTP_STATUS[error.code]), GRPC_STATUS[error.code].name]


def functions_of(owner: type) -> dict[str, Any]:
    """Return the methods and properties that a class defines itself, and of its bases of ours."""
    found: dict[str, Any] = {}
    for each in reversed(owner.__mro__):
        if is_ours(each):
            found |= {name: value for name, value in vars(each).items() if is_function(value)}
    return found


def is_function(value: object) -> bool:
    kinds = (property, staticmethod, classmethod, functools.cached_property)
    return inspect.isfunction(value) or isinstance(value, kinds)


def is_ours(owner: type) -> bool:
    return owner.__module__.partition(".")[0] in ("kernel", "protocols", "schedulers", "backends", "shm")


def documented_fields(owner: type) -> dict[str, bool]:
    """Return the attributes that a class declares, or its bases of ours, and whether a comment `#:` explains each."""
    found: dict[str, bool] = {}
    for each in reversed(owner.__mro__):
        if is_ours(each):
            for name, explained in declared_fields(each).items():
                found[name] = explained or found.get(name, False)
    return found


@functools.cache
def declared_fields(owner: type) -> dict[str, bool]:
    """Return the same for one class. Attributes that only `__init__` sets count if they are explained."""
    lines, _ = inspect.findsource(owner)
    [node] = [
        node
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__
    ]
    found: dict[str, bool] = {}
    targets: list[ast.expr]
    for statement in ast.walk(node):
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        elif isinstance(statement, ast.Assign):
            targets = statement.targets
        else:
            continue
        explained = lines[statement.lineno - 2].strip().startswith("#:")
        for target in targets:
            if isinstance(target, ast.Name) and statement in node.body:
                found[target.id] = explained
            elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and explained:
                found.setdefault(target.attr, True)
    return found

"""Lets autodoc read our docstrings and annotations as they are written.

- Annotations name types that are imported for type checkers only. The signature of a `msgspec.Struct` evaluates them.
- A name in backticks links to its entry in the reference, wherever that is; a name without an entry stays code.
- A class whose entry takes the text of the class alone (`:class-doc-from: class`) is made by the server: it is shown
  without the parameters of its `__init__`.
- A block that begins with `Args:` is a list of parameters.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import naiad
import naiad.testing
from sphinx.util.nodes import make_refnode

if TYPE_CHECKING:
    from types import ModuleType

    from docutils import nodes
    from sphinx import addnodes
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

_MODULE = re.compile(r"^\.\. currentmodule:: ([\w.]+)$", re.MULTILINE)
_PARAMETER = re.compile(r"^    (\w+): ")


def documented_modules(app: Sphinx) -> list[str]:
    """Return the modules in which the names of the reference are defined."""
    pages = (Path(app.srcdir) / "docs" / "reference").glob("*.md")
    found = {name for page in pages for name in _MODULE.findall(page.read_text(encoding="utf-8"))}
    public = {*naiad._MODULES.values(), *naiad.testing._MODULES.values()}
    return sorted((found | public) - {"naiad", "naiad.testing"})


def import_types(app: Sphinx) -> None:
    """Import what the modules of the reference import for type checkers, after everything else is imported."""
    modules = [importlib.import_module(name) for name in documented_modules(app)]
    for module in modules:
        add_types(module)
        # The base class of a struct may be in another module.
        for value in list(vars(module).values()):
            if isinstance(value, type) and hasattr(value, "__struct_fields__") and value.__module__ in sys.modules:
                add_types(sys.modules[value.__module__])


def add_types(module: ModuleType) -> None:
    """Define the names that are imported under `if TYPE_CHECKING:` of a module: the types, or else `Any`."""
    file, names = module.__file__, vars(module)
    if file is None:
        return
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING":
            continue
        for line in node.body:
            if isinstance(line, ast.ImportFrom) and line.module is not None:
                source = importlib.import_module(line.module)
                for alias in line.names:
                    names.setdefault(alias.asname or alias.name, getattr(source, alias.name, Any))


def link_by_last_name(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Node
) -> nodes.reference | None:
    """Return a link to the one entry of the reference whose name ends with what is named; None if there is none."""
    name = node["reftarget"].removesuffix("()")
    if node.get("refdomain") != "py" or (name.islower() and "." not in name):  # a parameter, or a common word
        return None
    ending = f".{name}"
    objects = env.domains.python_domain.objects
    found = [(name, entry) for name, entry in objects.items() if name.endswith(ending) and not entry.aliased]
    if len(found) != 1:
        return None
    [(name, entry)] = found
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, name)


def list_parameters(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn the lines after `Args:` into fields, up to the next empty line."""
    if "Args:" not in lines:
        return
    begin = lines.index("Args:")
    end = lines.index("", begin)
    lines[begin:end] = [_PARAMETER.sub(r":param \1: ", line) for line in lines[begin + 1 : end]]


def hide_parameters(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, None] | None:
    """Return the signature of a class that the server makes."""
    return ("", None) if what == "class" and options.class_doc_from == "class" else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", import_types)
    app.connect("missing-reference", link_by_last_name)
    app.connect("autodoc-process-docstring", list_parameters)
    app.connect("autodoc-process-signature", hide_parameters)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

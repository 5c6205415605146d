"""`naiad`, the public module: its names, what importing it costs, and programs with packages called as ours."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.docs.documents import PYTHONPATH, ROOT, code_spans, document, section

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "kernel" / "importable" / "naiad"

#: A program that uses what is its own, and the server.
PROGRAM = """
import numpy as np
{first}
from naiad import EmbeddedServer

with EmbeddedServer() as server:
    print(server.infer("add_sub", {{"INPUT0": np.ones(4, np.float32), "INPUT1": [1, 2, 3, 4]}})["OUTPUT0"].tolist())

import backends.postgres, kernel.radial, shm
print(backends.postgres.NAME, kernel.radial.NAME, shm.NAME, backends.OWN)
"""


def names_for_types(module: str) -> set[str]:
    """Return the names that type checkers see."""
    tree = ast.parse((FOLDER / module).read_text())
    return {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        if node.module.startswith(("kernel", "schedulers", "backends"))
        for alias in node.names
        if alias.asname is not None
    }


@pytest.mark.parametrize(("name", "file"), [("naiad", "__init__.py"), ("naiad.testing", "testing.py")])
def test_type_checkers_see_the_names_that_can_be_imported(name: str, file: str) -> None:
    module = importlib.import_module(name)
    public = {each for each in dir(module) if hasattr(getattr(module, each), "__module__") or each == "__version__"}
    assert names_for_types(file) <= public
    assert names_for_types(file) == set(vars(module)["_MODULES"])
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Sever'"):
        getattr(module, "Sever")  # noqa: B009 - type checkers know that it is not there


def test_the_page_lists_all_names() -> None:
    text = section(document("docs/embedding.md"), "Names that stay").partition("###")[0]
    listed = {span for span in code_spans(text) if span.isidentifier() or span == "__version__"}
    wanted = names_for_types("__init__.py") | names_for_types("testing.py")
    assert listed - {"naiad", "kernel", "protocols", "schedulers", "backends", "shm"} == wanted


def run(program: str, folder: Path, path: str = PYTHONPATH) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        capture_output=True, text=True, check=False, timeout=60, cwd=folder, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_importing_it_imports_nothing_else_of_the_server(tmp_path: Path) -> None:
    done = run(
        "import sys; before = set(sys.modules); import naiad;"
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('importlib')))",
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("['__future__', 'naiad', 'naiad.packages']\n", "")


def write_packages(folder: Path) -> None:
    """Write a package, a folder without `__init__.py`, and a module, which are called as our packages."""
    for name, text in {
        "backends/__init__.py": "OWN = True",
        "backends/postgres.py": "NAME = 'postgres'",
        "kernel/radial.py": "NAME = 'radial'",
        "shm.py": "NAME = 'shm'",
        "schedulers/data/notes.txt": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("first", ["", "import shm, backends"], ids=["after", "before"])
def test_a_program_with_packages_called_as_ours_embeds_the_server(tmp_path: Path, first: str) -> None:
    write_packages(tmp_path)
    done = run(PROGRAM.format(first=first), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[2.0, 3.0, 4.0, 5.0]\npostgres radial shm True\n"


def test_that_also_holds_where_workers_would_find_the_packages_of_the_program(tmp_path: Path) -> None:
    write_packages(tmp_path)
    done = run(PROGRAM.format(first=""), tmp_path, f"{tmp_path}:{PYTHONPATH}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[2.0, 3.0, 4.0, 5.0]\npostgres radial shm True\n"


@pytest.mark.parametrize("first", ["", "import backends.base\n"], ids=["after", "before"])
def test_a_module_that_both_have_is_an_error_that_says_what_to_do(tmp_path: Path, first: str) -> None:
    write_packages(tmp_path)
    (tmp_path / "backends" / "base.py").write_text("")
    done = run(f"{first}import naiad", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: your package 'backends' ({tmp_path}/backends) and Naiad's package 'backends' ({ROOT}/backends) "
        "both have a module called 'base', and Python can import only one of them: rename yours, or run the server as "
        "a process of its own ('naiad run', without that folder in PYTHONPATH) and send requests to it"
    )


def installed_script() -> str:
    """Return what the script `naiad` runs that pip installs."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        module, _, function = tomllib.load(file)["project"]["scripts"]["naiad"].partition(":")
    return f"from {module} import {function}; {function}()"


@pytest.mark.parametrize("command", [("-m", "naiad"), ("-c", installed_script())], ids=["module", "script"])
def test_the_command_line_works_where_pythonpath_has_packages_called_as_ours(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    write_packages(tmp_path)
    (tmp_path / "kernel" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-P", *command, "check", str(ROOT / "kernel/demo/add_sub"), "--requests=1"],
        capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{PYTHONPATH}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok" in done.stdout

"""What is known of an environment's interpreter before a worker runs on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from backends.environments.interpreter import (
    Interpreter,
    applied,
    ask,
    check,
    described,
    environment_folder,
    interpreter_in,
    variables_of,
)
from backends.environments.messages import EnvironmentFailed


def environment(folder: Path, name: str = "python", program: str | None = None) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n' if program is None else program)
    (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("name", ["python", "python3"])
def test_an_interpreter_says_what_it_has(tmp_path: Path, name: str) -> None:
    folder = environment_folder(environment(tmp_path / "env", name), "it")
    found = ask(interpreter_in(folder), variables_of(folder, os.environ), "it")
    assert found.version == sys.version_info[:3]
    assert found.numpy
    check(found, "it")
    assert described(found).startswith("Python 3.")


def test_an_environment_may_be_the_only_folder_of_an_archive(tmp_path: Path) -> None:
    environment(tmp_path / "env")
    assert environment_folder(tmp_path, "it") == tmp_path / "env"
    (tmp_path / "other").mkdir()
    with pytest.raises(EnvironmentFailed, match="'it' is not an environment: it has no bin/python"):
        environment_folder(tmp_path, "it")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("#!/bin/sh\necho 'error while loading libpython3.so' >&2\nexit 127\n", "does not start: error while loading"),
        ("#!/bin/sh\nexit 3\n", "does not start: exit code 3"),
        ("#!/bin/sh\necho hello\n", "is not Python 3"),
        ("\x7fELF no program", "does not start: "),
    ],
)
def test_one_that_does_not_start_is_refused_with_what_it_printed(tmp_path: Path, program: str, reason: str) -> None:
    folder = environment(tmp_path / "env", program=program)
    with pytest.raises(EnvironmentFailed, match=reason):
        ask(interpreter_in(folder), {}, "it")


def test_an_old_python_and_one_without_numpy_are_refused() -> None:
    with pytest.raises(EnvironmentFailed, match=r"'it' has Python 3\.8\.18; a worker needs 3\.9 or newer"):
        check(Interpreter((3, 8, 18), "1.24", "", ""), "it")
    with pytest.raises(EnvironmentFailed, match=r"has no NumPy, which a worker needs \(No module named 'numpy'\)"):
        check(Interpreter((3, 9, 0), "", "", "No module named 'numpy'"), "it")


def test_variables_of_a_venv_and_of_a_conda_environment(tmp_path: Path) -> None:
    ours = str(Path(__file__).parents[3])
    own = {"PATH": "/bin", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/y", "PYTHONPATH": f"{ours}:/mine", "A": "1"}
    found = applied(variables_of(tmp_path, own), own)
    assert found == {
        "PATH": f"{tmp_path}/bin:/bin", "VIRTUAL_ENV": str(tmp_path), "PYTHONPATH": "/mine", "A": "1",
        "PYTHONNOUSERSITE": "1",
    }  # fmt: skip
    (tmp_path / "conda-meta").mkdir()
    found = applied(variables_of(tmp_path, {**own, "LD_LIBRARY_PATH": "/lib"}), own)
    assert found["CONDA_PREFIX"] == str(tmp_path)
    assert found["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:/lib"
    assert "VIRTUAL_ENV" not in found

"""Finds the interpreter of an environment and the variables for its processes; checks its version and packages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backends.environments.messages import EnvironmentFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The oldest version of Python that runs the code of workers; see `backends/portable/start.py`.
OLDEST = (3, 9)

#: The folder that has our packages.
_OUR_FOLDER = str(Path(__file__).parents[2])

#: Names of an interpreter in an environment's folder `bin`.
_NAMES = ("python", "python3")

#: How much of what a program has printed is in an error, in lines.
_LAST_LINES = 8

#: Runs on any Python 3.
_QUESTION = """
import json, sys
found = {"version": list(sys.version_info[:3]), "numpy": "", "msgspec": "", "problem": ""}
try:
    import numpy
    found["numpy"] = numpy.__version__
except Exception as error:
    found["problem"] = "%s: %s" % (type(error).__name__, error)
try:
    import msgspec
    found["msgspec"] = msgspec.__version__
except Exception:
    pass
sys.stdout.write("\\n" + json.dumps(found))
"""


class Interpreter(msgspec.Struct, frozen=True):
    """What an interpreter reports: its version, and name → version of packages, "" for a missing one."""

    version: tuple[int, int, int]
    numpy: str
    msgspec: str
    #: Why NumPy cannot be imported.
    problem: str


def environment_folder(folder: Path, source: str) -> Path:
    """Return the folder that has `bin/python`: `folder`, or the only folder in it. Raises `EnvironmentFailed`."""
    for candidate in (folder, *_only_folder(folder)):
        if any((candidate / "bin" / name).exists() for name in _NAMES):
            return candidate
    raise EnvironmentFailed(f"'{source}' is not an environment: it has no bin/python")


def _only_folder(folder: Path) -> list[Path]:
    try:
        entries = [entry for entry in folder.iterdir() if entry.name[0] != "."]
    except OSError as error:
        raise EnvironmentFailed(f"'{folder}' cannot be read: {error.strerror}") from None
    return [entry for entry in entries if entry.is_dir()] if len(entries) == 1 else []


def interpreter_in(folder: Path) -> str:
    """Return the path of the interpreter of an environment, for which `environment_folder` has found its folder."""
    return next(str(folder / "bin" / name) for name in _NAMES if (folder / "bin" / name).exists())


def variables_of(folder: Path, own: Mapping[str, str]) -> dict[str, str | None]:
    """Return what activating the environment changes in the variables `own` of this process. Pure but for one look.

    As Triton, its libraries are found first (a conda environment has its own). Variables that would lead the
    interpreter to the packages of the server are taken out.
    """
    found: dict[str, str | None] = {
        "PATH": _before(str(folder / "bin"), own.get("PATH", os.defpath)),
        "PYTHONHOME": None,
        "PYTHONNOUSERSITE": "1",
        "PYTHONEXECUTABLE": None,
        "__PYVENV_LAUNCHER__": None,
        # Other folders stay, as in Triton.
        "PYTHONPATH": os.pathsep.join(_without_ours(own.get("PYTHONPATH", ""))) or None,
    }
    if (folder / "conda-meta").is_dir():
        found["CONDA_PREFIX"] = str(folder)
        found["CONDA_DEFAULT_ENV"] = folder.name
        found["VIRTUAL_ENV"] = None
        found["LD_LIBRARY_PATH"] = _before(str(folder / "lib"), own.get("LD_LIBRARY_PATH", ""))
    else:
        found["VIRTUAL_ENV"] = str(folder)
        found["CONDA_PREFIX"] = None
    return found


def _without_ours(python_path: str) -> list[str]:
    """Return the folders of a search path except that of our packages, which often has the server's other packages."""
    return [each for each in python_path.split(os.pathsep) if each and os.path.abspath(each) != _OUR_FOLDER]


def _before(first: str, rest: str) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first


def applied(variables: Mapping[str, str | None], own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables `own` with the changes of `variables`. Pure."""
    changed = {**own, **variables}
    return {name: value for name, value in changed.items() if value is not None}


def ask(interpreter: str, variables: Mapping[str, str | None], source: str) -> Interpreter:
    """Start the interpreter and return what it says. Raises `EnvironmentFailed` with the end of what it printed."""
    try:
        done = subprocess.run(
            [interpreter, "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=applied(variables, os.environ),
            check=False,
        )
    except OSError as error:
        raise EnvironmentFailed(f"'{interpreter}' of the environment '{source}' does not start: {error}") from None
    if done.returncode:
        raise EnvironmentFailed(
            f"'{interpreter}' of the environment '{source}' does not start: "
            f"{last_lines(done.stderr.decode(errors='replace')) or f'exit code {done.returncode}'}"
        )
    try:
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Interpreter)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise EnvironmentFailed(f"'{interpreter}' of the environment '{source}' is not Python 3") from None


def check(found: Interpreter, source: str) -> None:
    """Raise `EnvironmentFailed` unless the interpreter can run a worker. Pure."""
    if found.version < OLDEST:
        raise EnvironmentFailed(
            f"the environment '{source}' has Python {_dotted(found.version)}; a worker needs {_dotted(OLDEST)} or newer"
        )
    if not found.numpy:
        raise EnvironmentFailed(f"the environment '{source}' has no NumPy, which a worker needs ({found.problem})")


def described(found: Interpreter) -> str:
    """Return what the log says of an interpreter."""
    return f"Python {_dotted(found.version)}, NumPy {found.numpy}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def last_lines(text: str) -> str:
    """Return the last lines of what a program has printed, in one line."""
    return "; ".join([line.strip() for line in text.splitlines() if line.strip()][-_LAST_LINES:])

"""Makes an environment with the packages of a file of requirements: with uv if it is there, else with venv and pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from backends.environments.interpreter import ask, interpreter_in, last_lines, variables_of
from backends.environments.messages import EnvironmentFailed
from backends.environments.progress import ShownLines
from backends.environments.requirements import allows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from backends.environments.requirements import Requirements

#: What a worker needs, and what makes it faster.
_NEEDED = "numpy"
_FASTER = "msgspec>=0.19"

#: How lines begin that say nothing about how far an installation is.
_NO_PROGRESS = ("Looking in", "Using Python")


class Installer:
    """Runs the programs that install. `say` gets lines for the log."""

    def __init__(self, file: Path, say: Callable[[str], None], uv: str | None = None) -> None:
        """`file` is the file of requirements. `uv` is the path of uv; None for where it is found, "" for none."""
        self._file = file
        self._say = say
        self._uv = (shutil.which("uv") or "") if uv is None else uv

    def make(self, folder: Path, requirements: Requirements) -> None:
        """Make the environment in `folder`, which is empty. Raises `EnvironmentFailed`, `OSError`."""
        started = time.monotonic()
        self._say(f"installing the packages of '{self._file}' with {'uv' if self._uv else 'pip'}")
        self._make_venv(folder, requirements.python)
        python = interpreter_in(folder)
        self._install(python, *requirements.arguments)
        variables = variables_of(folder, os.environ)
        found = ask(python, variables, str(self._file))
        if not found.numpy:
            self._install(python, _NEEDED)
        if not found.msgspec:
            try:
                self._install(python, _FASTER)
            except EnvironmentFailed as error:  # the worker does without
                self._say(f"msgspec was not installed, so that messages take longer: {error}")
        self._say(f"the packages of '{self._file}' were installed in {time.monotonic() - started:.0f} s")

    def _make_venv(self, folder: Path, python: str) -> None:
        fits = not python or allows(python, tuple(sys.version_info[:3]))
        if self._uv:
            # uv finds, or downloads, another version of Python where the server's does not fit.
            wanted = sys.executable if fits else python
            self._run(self._uv, "venv", "--quiet", "--no-project", "--allow-existing", "--python", wanted, str(folder))
        elif not fits:
            raise EnvironmentFailed(
                f"'{self._file}' requires Python {python}, and the server has {sys.version.split()[0]}. Other versions "
                "can be had where uv is installed"
            )
        else:
            self._run(sys.executable, "-m", "venv", str(folder))

    def _install(self, python: str, *arguments: str) -> None:
        if self._uv:
            self._run(self._uv, "pip", "install", "--python", python, *arguments)
        else:
            self._run(python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments)

    def _run(self, *command: str) -> None:
        """Run a program in the folder of the file, so that relative paths in it are found. Shows its progress."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        process = subprocess.Popen(
            command,
            cwd=self._file.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        assert process.stdout is not None
        tail = deque[str](maxlen=100)
        progress = ShownLines()
        with process:
            for line in process.stdout:
                tail.append(line)
                if line.strip() and not line.startswith(_NO_PROGRESS) and progress.shows(time.monotonic_ns()):
                    self._say(line.strip())
        if process.returncode:
            raise EnvironmentFailed(
                f"the packages of '{self._file}' cannot be installed (the server ignores this file with "
                f"--install-requirements=false): {_reason(tail, command)}"
            )


def _reason(tail: Sequence[str], command: Sequence[str]) -> str:
    """Return the lines that say what went wrong. pip marks them."""
    errors = "\n".join(line for line in tail if line.startswith("ERROR"))
    return last_lines(errors) or last_lines("\n".join(tail)) or f"'{command[0]}' failed"

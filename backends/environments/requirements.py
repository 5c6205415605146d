"""What a file of requirements asks for: the packages, the versions of Python, and a key for its environment.

Lines of progress, not more often than a person wants to read them. Pure.

Makes an environment with the packages of a file of requirements: with uv if it is there, else with venv and pip.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from backends.environments.interpreter import ask, interpreter_in, last_lines, variables_of
from backends.environments.messages import EnvironmentFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: Part of each key: increased when environments are made in another way.
_SCHEME = "1"

_MAX_FILES = 100

#: Options of a line that name another file of requirements.
_INCLUDES = ("-r", "-c", "--requirement", "--constraint")

_CLAUSE = re.compile(r"(===|~=|==|!=|<=|>=|<|>)\s*([0-9]+(?:\.[0-9]+)*)(\.\*)?", re.ASCII)


class Requirements(msgspec.Struct, frozen=True):
    """What is installed."""

    #: Arguments of `pip install` and of `uv pip install`.
    arguments: tuple[str, ...]
    #: The versions of Python that are asked for, such as `>=3.10`; "" for any.
    python: str
    #: The same for the same packages on the same Python of the server.
    key: str
    #: The file, and those that it includes.
    files: tuple[str, ...]


def read_requirements(file: Path) -> Requirements:
    """Read a `requirements.txt` or a `pyproject.toml`. Blocks. Raises `EnvironmentFailed`."""
    digest, files = hashlib.sha256(), {file.resolve()}
    for part in (_SCHEME, sys.version, sysconfig.get_platform(), sys.base_prefix):
        digest.update(part.encode() + b"\0")
    try:
        if file.suffix == ".toml":
            project = tomllib.loads(file.read_text())["project"]
            packages, python = project["dependencies"], project.get("requires-python", "")
            if not isinstance(packages, list) or not all(isinstance(each, str) for each in [*packages, python]):
                raise ValueError("project.dependencies must be a list of texts, requires-python a text")
            # After `--`, so that no text can be an option.
            arguments = ("--", *packages)
            digest.update(msgspec.json.encode([packages, python]))
        else:
            arguments, python = ("-r", str(file)), ""
            files.clear()
            _add_file(file, digest.update, files)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentFailed(f"'{file}' cannot be read: {error}") from None
    return Requirements(arguments, python, digest.hexdigest()[:32], tuple(sorted(map(str, files))))


def _add_file(file: Path, add: Callable[[bytes], None], seen: set[Path]) -> None:
    """Add a file and those that it includes to a digest by `add`, and what is known of local packages that it names."""
    file = file.resolve()
    if file in seen:
        return
    if len(seen) >= _MAX_FILES:
        raise ValueError(f"it includes more than {_MAX_FILES} files")
    seen.add(file)
    text = file.read_text()
    add(text.encode() + b"\0")
    for line in text.replace("\\\n", " ").splitlines():
        words = _words(line)
        for index, word in enumerate(words):
            option, _, value = word.partition("=")
            if option in _INCLUDES:
                value = value or (words[index + 1] if index + 1 < len(words) else "")
                if value and "://" not in value:
                    _add_file(file.parent / value, add, seen)
            elif "/" in word and "://" not in word and (path := file.parent / word).exists():
                status = path.stat()
                add(f"{word}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # the installer says what is wrong with it
        return []


def allows(python: str, version: tuple[int, ...]) -> bool:
    """Whether `requires-python` allows a version such as (3, 11, 7). Pure. Raises `EnvironmentFailed`."""
    return all(_holds(clause, version) for part in python.split(",") if (clause := part.strip()))


def _holds(clause: str, version: tuple[int, ...]) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise EnvironmentFailed(f"requires-python has '{clause}', expected versions such as '>=3.10,<3.14'")
    operator, text, wildcard = match.groups()
    wanted = tuple(int(part) for part in text.split("."))
    if wildcard:
        same = version[: len(wanted)] == wanted
        return same if operator == "==" else not same
    if operator == "~=":
        return version >= wanted and version[: len(wanted) - 1] == wanted[:-1]
    size = max(len(wanted), len(version))
    left, right = version + (0,) * (size - len(version)), wanted + (0,) * (size - len(wanted))
    return {
        "==": left == right, "===": left == right, "!=": left != right,
        "<": left < right, ">": left > right, "<=": left <= right, ">=": left >= right,
    }[operator]  # fmt: skip


def archive_key(archive: Path, cache_folder: Path) -> str:
    """Return the digest of an archive. That of one which has not changed since the last time is read from the cache."""
    status = archive.stat()
    known = f"{os.path.realpath(archive)}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
    remembered = cache_folder / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.digest"
    try:
        found = remembered.read_text()
        if re.fullmatch(r"[0-9a-f]{32}", found, re.ASCII):
            return found
    except OSError:
        pass
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    written = remembered.with_suffix(f".{os.getpid()}")
    written.write_text(found)
    written.rename(remembered)
    return found


#: The time between two lines that are not the first of their kind, in nanoseconds.
INTERVAL_NS = 5_000_000_000


class ShownLines:
    """Decides which lines are shown."""

    def __init__(self) -> None:
        self._shown_ns: int | None = None

    def shows(self, now_ns: int) -> bool:
        """Whether a line that comes now is shown: the first one, and then one in each interval."""
        if self._shown_ns is not None and now_ns - self._shown_ns < INTERVAL_NS:
            return False
        self._shown_ns = now_ns
        return True


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

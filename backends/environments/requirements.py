"""What a file of requirements asks for: the packages, the versions of Python, and a key for its environment."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import sysconfig
import tomllib
from typing import TYPE_CHECKING

import msgspec

from backends.environments.messages import EnvironmentFailed

if TYPE_CHECKING:
    from collections.abc import Callable
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

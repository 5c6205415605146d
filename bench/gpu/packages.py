"""Which packages a machine lacks to run the server: by name and version, also those that packages need themselves.

It needs the standard library only: it runs before anything else is imported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
import tomllib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: The name, the versions, and the condition of a requirement (PEP 508). What has an address or extras is read, too.
_REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)@]*)\)?[^;]*(?:;(.*))?")
_AT_LEAST = re.compile(r">=\s*([\d.]+)")
#: Conditions that name another system or an older Python; all others are taken to hold, but for conditions of extras.
_ELSEWHERE = re.compile(
    r"extra\s*==|win32|Windows|Darwin|darwin|emscripten|PyPy|pypy|python_(?:full_)?version\s*(<=?|==)\s*[\"']([\d.]+)"
)

#: Distributions with the same modules.
_INSTEAD = {"onnxruntime": "onnxruntime-gpu"}

#: A condition that names what this machine is not.
_OTHER_THAN = re.compile(r"!=\s*[\"'][^\"']*[\"']")


def requirement_of(text: str) -> tuple[str, str] | None:
    """Return the name and the least version ("" for any) of a requirement; None if it does not hold here."""
    found = _REQUIREMENT.fullmatch(text)
    if found is None:
        return None
    name, versions, condition = found.groups()
    elsewhere = _ELSEWHERE.finditer(_OTHER_THAN.sub("", condition or ""))
    if not all(each[2] and _holds(each[1], each[2]) for each in elsewhere):
        return None
    least = _AT_LEAST.search(versions)
    return name, least[1] if least else ""


def _holds(comparison: str, version: str) -> bool:
    ours, other = sys.version_info[:2], numbers(version)[:2]
    return ours < other or (comparison != "<" and ours == other)


def _version(name: str, version_of: Callable[[str], str]) -> str:
    try:
        return version_of(name)
    except importlib.metadata.PackageNotFoundError:
        if name not in _INSTEAD:
            raise
        return version_of(_INSTEAD[name])


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers with which a version begins: 1.2.3rc1 is (1, 2, 3)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-zA-Z+!]", version)[0]))


def wrong_packages(
    project: Path,
    version_of: Callable[[str], str] = importlib.metadata.version,
    requires: Callable[[str], list[str] | None] = importlib.metadata.requires,
) -> list[str]:
    """Return a line for each package that is missing or too old: dependencies of `project`, a pyproject.toml, psutil,
    and all that these need."""
    dependencies = tomllib.loads(project.read_text())["project"]["dependencies"]
    waiting = deque((text, "the server") for text in [*dependencies, "psutil", "cuda-bindings"])
    seen, wrong = set[str](), list[str]()
    while waiting:
        text, needing = waiting.popleft()
        found = requirement_of(text)
        if found is None:
            continue
        name, least = found
        try:
            version = _version(name, version_of)
        except importlib.metadata.PackageNotFoundError:
            if name not in seen:
                wrong.append(f"{name}{f' {least}' if least else ''}, which {needing} needs, is not installed")
            seen.add(name)
            continue
        if least and numbers(version) < numbers(least):
            wrong.append(f"{name} {version} is installed, and {needing} needs {least} or newer")
        if name not in seen:
            seen.add(name)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # another one stands in for it
                waiting.extend((each, name) for each in requires(name) or ())
    return wrong

"""Formats an exception of a model's code for the model's author: the exception first, then the model's own lines.

Clients and logs get Triton's text (`backends.python.failures.describe`); this one is for a terminal.
"""

from __future__ import annotations

import linecache
import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Lines of the source that are shown before the line that was executed.
_LINES_BEFORE = 2

#: Frames of these files are the server's.
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"


def describe_for_author(error: BaseException, model_dir: Path) -> str:
    """Return the exception, the frames of files in `model_dir` with their lines, and then those of libraries.

    The innermost frame is first. Exceptions that led to this one follow.
    """
    seen: set[int] = set()
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        parts.append(_one(current, model_dir))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nwhich was raised because of:\n\n".join(parts)


def _one(error: BaseException, model_dir: Path) -> str:
    root = f"{model_dir.resolve()}/"
    lines = ["".join(traceback.format_exception_only(type(error), error)).rstrip(), ""]
    others: list[str] = []
    own_count = 0
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        path, function = os.path.realpath(frame.f_code.co_filename), frame.f_code.co_name
        if path.startswith(root):
            lines.append(f"  {path.removeprefix(root)}:{number} in {function}")
            lines += _source(path, number, 0 if own_count else _LINES_BEFORE)
            own_count += 1
        elif not path.startswith(_OURS) and not frame.f_code.co_filename.startswith("<frozen"):
            others.append(f"    {path}:{number} in {function}")
    if others:
        lines += ["", f"  in libraries{', called from there' if own_count else ''}:", *others]
    return "\n".join(lines).rstrip() + "\n"


def _source(path: str, number: int, before: int) -> Iterator[str]:
    """Yield the line `number` of a file and the lines before it, with their numbers."""
    linecache.checkcache(path)
    for shown in range(max(1, number - before), number + 1):
        text = linecache.getline(path, shown).rstrip()
        yield f"    {'>' if shown == number else ' '} {shown:4} | {text}".rstrip()

"""The terminal of a model's author as standard input and output of a worker (`naiad dev`).

So `breakpoint()`, `pdb.set_trace()` and `input()` work in a model, and what it prints appears as it is. The setting
`terminal` of the backend names the terminal's device.

Formats an exception of a model's code for the model's author: the exception first, then the model's own lines.

Clients and logs get Triton's text (`backends.python.failures.describe`); this one is for a terminal.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from typing import TYPE_CHECKING

from backends.python.failures import show_failures
from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Lines of the source that are shown before the line that was executed.
_LINES_BEFORE = 2

#: Frames of these files are the server's.
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"


def describe_for_author(error: BaseException, model_dir: Path) -> str:
    """Return the exception, the frames of files in `model_dir` with their lines, and then the frames of libraries.

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


#: The setting of the backend: the path of the terminal's device.
SETTING = "terminal"


def use_terminal(device: str, model_dir: Path) -> None:
    """Make a terminal the standard streams of this process, and show failures of the model in `model_dir` there.

    Raises `InvalidArgument` if `device` is not a terminal that can be opened.
    """
    try:
        # Not as the controlling terminal: Ctrl-C goes to the server, which ends its workers.
        fd = os.open(device, os.O_RDWR | os.O_NOCTTY)
    except OSError as error:
        raise InvalidArgument(f"backend setting {SETTING}: '{device}' cannot be opened: {error.strerror}") from None
    try:
        if not os.isatty(fd):
            raise InvalidArgument(f"backend setting {SETTING}: '{device}' is not a terminal")
        for target in (0, 1, 2):
            os.dup2(fd, target)
    finally:
        os.close(fd)
    # New objects: the objects of the start may be closed, and write a file's blocks instead of a terminal's lines.
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - open while the process lives
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115 - as above
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115 - as above
    show_failures(lambda error: _show(error, model_dir))


def _show(error: BaseException, model_dir: Path) -> None:
    sys.stderr.write(f"\n{describe_for_author(error, model_dir)}\n")

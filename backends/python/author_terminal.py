"""The terminal of a model's author as standard input and output of a worker (`naiad dev`).

So `breakpoint()`, `pdb.set_trace()` and `input()` work in a model, and what it prints appears as it is. The setting
`terminal` of the backend names the terminal's device.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from backends.python.author_traceback import describe_for_author
from backends.python.failures import show_failures
from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

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
    # New objects: those of the start may be closed, and write a file's blocks instead of a terminal's lines.
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - open while the process lives
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115 - as above
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115 - as above
    show_failures(lambda error: _show(error, model_dir))


def _show(error: BaseException, model_dir: Path) -> None:
    sys.stderr.write(f"\n{describe_for_author(error, model_dir)}\n")

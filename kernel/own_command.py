"""The command that runs a module of ours in a new process of the server's interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: The folder of our packages.
_OUR_FOLDER = os.path.realpath(Path(__file__).parents[1])


def own_command(module: str) -> list[str]:
    """Return the command for `module`.

    `-m` puts the current folder before all others, and a user may have a module `kernel` there: `-P` keeps the folder
    out. Our own folder stays: there the server runs without being installed.
    """
    try:
        own = os.path.realpath(os.getcwd()) == _OUR_FOLDER
    except FileNotFoundError:  # the folder was removed
        own = False
    return [sys.executable, *([] if own else ["-P"]), "-m", module]

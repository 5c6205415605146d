"""Where the public module `naiad` is, which is imported by that name alone.

An installation has it beside our packages, or its folder on its path. `make_importable` is for a server that runs in a
checkout which is not installed.
"""

from __future__ import annotations

import os
import sys

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "importable")


def make_importable() -> None:
    """Let code that is about to be imported (a backend, a scheduler, ...) import `naiad`, wherever it is."""
    if _FOLDER not in sys.path:
        sys.path.append(_FOLDER)

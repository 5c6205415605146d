"""Where the public module `naiad` is, which is imported by that name alone.

An installation has it beside our packages, or its folder on its path. `make_importable` is for a server that runs in a
checkout which is not installed.
"""

from __future__ import annotations

import os
import sys

_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_FOLDER = os.path.join(_OUR_FOLDER, "kernel", "importable")
_OUR_PACKAGES = ("kernel", "protocols", "schedulers", "backends", "shm")

#: Runs one of our modules where PYTHONPATH has packages that are called as ours.
RUN_MODULE = os.path.join(_FOLDER, "naiad", "run_module.py")


def make_importable() -> None:
    """Let code that is about to be imported (a backend, a scheduler, ...) import `naiad`, wherever it is."""
    if _FOLDER not in sys.path:
        sys.path.append(_FOLDER)


def is_shadowed() -> bool:
    """Whether a folder of PYTHONPATH other than ours has a module or package that is called as one of our packages."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return any(
        os.path.exists(os.path.join(folder, f"{name}{end}"))
        for folder in folders
        if os.path.realpath(folder) != _OUR_FOLDER
        for name in _OUR_PACKAGES
        for end in ("", ".py")
    )

"""A mount namespace of this process's own, for servers whose file systems fail. Needs the right to mount."""

from __future__ import annotations

import ctypes
import subprocess

_CLONE_NEWNS = 0x00020000


def own_mounts() -> None:
    """Let later mounts be seen by this process and those that it starts only. Raises `OSError`."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "a mount namespace is not allowed")
    mount("--make-rprivate", "/")


def mount(*arguments: str) -> None:
    """Run `mount`. Raises `subprocess.CalledProcessError`."""
    subprocess.run(["mount", *arguments], check=True)

"""What a process of the server asks of the system: its end with its parent, its name, and to take memory back."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when `parent` dies, whatever it does then. Exits if `parent` is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the kernel is gone")


def set_process_name(name: str) -> None:
    """Show the first 15 bytes of `name` as the name of this process (prctl(2)), as far as they are ASCII."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode("ascii", "replace")[:15])


def give_memory_back() -> None:
    """Give freed memory back to the system (malloc_trim(3)). Takes about a millisecond."""
    ctypes.CDLL(None).malloc_trim(0)

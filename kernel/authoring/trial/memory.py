"""The memory of worker processes, as the system counts it."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PRIVATE = re.compile(rb"^Private_\w+:\s+(\d+) kB$", re.MULTILINE)


def workers() -> dict[int, str]:
    """Return the worker processes of this server: process id → the name of its instance or model."""
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if b"backends.worker" not in words or f"--kernel={os.getpid()}".encode() not in words:
            continue
        titles = [word.removeprefix(b"--model=") for word in words if word.startswith(b"--model=")]
        if titles:
            found[int(entry)] = titles[0].decode(errors="replace")
    return found


def private_byte_size(pid: int) -> int:
    """Return the memory that would be free without the process: what it shares with others does not count.

    0 if the process has ended.
    """
    try:
        text = Path("/proc", str(pid), "smaps_rollup").read_bytes()
    except OSError:
        return 0
    return sum(map(int, _PRIVATE.findall(text))) * 1024

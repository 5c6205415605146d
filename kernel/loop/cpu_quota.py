"""The number of processors that this process may use: its CPU affinity, or less if its control group has a quota."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def processor_count() -> int:
    """Return the number of whole processors, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, int(min([allowed, *map(_quota, _quota_files())])))


def _quota_files() -> list[Path]:
    """Return the `cpu.max` files of this process' control group (version 2) and of all visible groups above it."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = _GROUPS / own
    return [folder / "cpu.max" for folder in (group, *group.parents) if folder.is_relative_to(_GROUPS)]


def _quota(file: Path) -> float:
    """Return the processors that `file` allows: "QUOTA PERIOD" in microseconds, or "max PERIOD" for no limit."""
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")

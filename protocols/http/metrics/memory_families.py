"""The memory of model instances: what backends report, and what the system knows of worker processes.

The system is asked in a thread, at most once per interval: with many workers it takes milliseconds.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from protocols.http.metrics.formats import label_text
from protocols.http.metrics.model_families import labels_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.model_figures import ModelFigures

REPORTED = "naiad_model_instance_memory_bytes"
MEASURED = "naiad_worker_memory_bytes"

_PAGE = os.sysconf("SC_PAGE_SIZE")


class WorkerMemoryReader:
    """What memory worker processes use, as it was when `refresh` was called last."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_ns = interval_ms * 1_000_000
        self._read_ns = 0
        #: Process id → bytes that are neither of files nor shared memory.
        self.byte_sizes: dict[int, int] = {}

    async def refresh(self, models: Iterable[ModelFigures], now_ns: int) -> None:
        """Ask the system, unless the interval has not passed and no worker is new."""
        pids = {pid for model in models for pid in model.statistics.memory.pids.values()}
        if now_ns - self._read_ns < self._interval_ns and pids <= self.byte_sizes.keys():
            return
        self._read_ns = now_ns
        self.byte_sizes = await asyncio.to_thread(_private_byte_sizes, pids)


def _private_byte_sizes(pids: Iterable[int]) -> dict[int, int]:
    """Return the bytes of anonymous memory of each process; 0 for one that has ended."""
    found = {}
    for pid in pids:
        try:
            found[pid] = private_byte_size(Path(f"/proc/{pid}/statm").read_text())
        except OSError:
            found[pid] = 0
    return found


def private_byte_size(statm: str) -> int:
    """Return what /proc/PID/statm says, which counts in pages: size resident shared ..."""
    _, resident, shared = statm.split()[:3]
    return max(int(resident) - int(shared), 0) * _PAGE


def render_memory(models: Iterable[ModelFigures], byte_sizes: dict[int, int]) -> list[str]:
    """Return the lines of both families, with `byte_sizes` by process id."""
    reported = _head(REPORTED, "Bytes of memory that a model instance uses, as its backend reports it")
    measured = _head(
        MEASURED, "Bytes of memory that the process of a model instance uses, without files and shared memory"
    )
    for model in models:
        memory = model.statistics.memory
        if not memory.pids and not memory.by_instance:
            continue
        labels = labels_of(model)
        for instance, uses in sorted(memory.by_instance.items()):
            for use in uses:
                text = label_text({**labels, "instance": instance, "kind": use.type, "device": str(use.id)})
                reported.append(f"{REPORTED}{{{text}}} {use.byte_size}")
        for instance, pid in sorted(memory.pids.items()):
            if byte_size := byte_sizes.get(pid, 0):
                measured.append(f"{MEASURED}{{{label_text({**labels, 'instance': instance})}}} {byte_size}")
    return [*reported, *measured]


def _head(name: str, help_text: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]

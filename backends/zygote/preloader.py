"""Imports what workers need, once, before they are forked.

Only the thread that forks is in the new process. So after each import the zygote must have one thread: OpenBLAS is
imported with one, and makes the others in the worker (`start_blas_threads`). ONNX Runtime starts one for its telemetry,
unless ORT_DISABLE_TELEMETRY is set (`backends/worker/process.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import threadpoolctl

from backends.registry import BUILT_IN

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

#: The variables that OpenBLAS reads, the one that counts first.
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")

#: Backends whose workers have no use for the threads of OpenBLAS: they calculate nothing with NumPy.
_WITHOUT_BLAS = frozenset({"", "identity", "onnxruntime", "repeat", "square"})


class PreloadFailed(Exception):
    """The message says what was imported and why it failed."""


class Preloader:
    """What this process has imported."""

    def __init__(self) -> None:
        self._backends: set[str] = set()
        self._blas = threadpoolctl.ThreadpoolController()
        with _one_blas_thread():
            process = importlib.import_module("backends.worker.process")
        process.prepare_environment()
        self._imported()

    def import_backend(self, name: str) -> None:
        """Import a built-in backend, once. Others are imported by the worker: nobody knows what they do at import.

        An error is the worker's: it imports the backend again, and responds with the error.
        """
        if name in self._backends or name not in BUILT_IN:
            return
        self._backends.add(name)
        with _one_blas_thread(), contextlib.suppress(Exception):
            importlib.import_module(BUILT_IN[name].partition(":")[0])
        self._imported()

    def import_chosen(self, modules: tuple[str, ...], file: str) -> None:
        """Import modules that a model has chosen, and run its file. Raises `PreloadFailed`."""
        with _one_blas_thread():
            for module in modules:
                try:
                    importlib.import_module(module)
                except Exception as error:
                    raise PreloadFailed(f"'{module}' cannot be imported: {type(error).__name__}: {error}") from error
            if file:
                try:
                    runpy.run_path(file)
                except Exception as error:
                    raise PreloadFailed(f"{Path(file).name} failed: {type(error).__name__}: {error}") from error
        self._imported()
        if (threads := thread_names())[1:]:
            what = ", ".join((*modules, *([Path(file).name] if file else [])))
            raise PreloadFailed(
                f"after '{what}' there are {len(threads)} threads ({', '.join(threads)}). Only what starts no threads "
                "can be imported before workers are forked"
            )

    def _imported(self) -> None:
        self._blas = threadpoolctl.ThreadpoolController().select(internal_api="openblas")
        # Garbage collections in workers then leave the pages of these objects shared.
        gc.collect()
        gc.freeze()

    def start_blas_threads(self, backend: str) -> None:
        """In a worker: let OpenBLAS have as many threads as it would have had without the zygote."""
        if backend in _WITHOUT_BLAS:
            return
        count = _blas_thread_count()
        if count > 1:
            for library in self._blas.lib_controllers:
                library.set_num_threads(count)


def thread_names() -> list[str]:
    """Return the names of the threads of this process."""
    return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]


def _blas_thread_count() -> int:
    for name in _BLAS_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value):
            return int(value)
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """OpenBLAS starts its threads when it is loaded, as many as this variable says."""
    name = _BLAS_VARIABLES[0]
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

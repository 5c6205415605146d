"""A CUDA of POSIX shared memory: device memory that processes share by handles, as the real one does, without a GPU.

`NAIAD_CUDA_BINDINGS=tests.fake_cuda` lets workers use it, and `install` lets clients, before they import tritonclient.
The rules of the real one hold: the exporter cannot open its own handle, a handle is opened once for each process and
device, memory that was freed cannot be opened, copies are made on streams and are complete when these were waited for.
"""

from __future__ import annotations

import sys
import types

from tests.fake_cuda import driver, runtime


def install() -> None:
    """Take the place of `cuda.bindings` in this process."""
    cuda, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    cuda.__path__ = bindings.__path__ = []  # packages
    cuda.bindings = bindings  # type: ignore[attr-defined]
    bindings.runtime, bindings.driver = runtime, driver  # type: ignore[attr-defined]
    sys.modules |= {
        "cuda": cuda, "cuda.bindings": bindings, "cuda.bindings.runtime": runtime, "cuda.bindings.driver": driver,
    }  # fmt: skip

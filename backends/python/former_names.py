"""Names that NVIDIA's backend for vLLM imports and that newer versions of vLLM have in other modules.

The file of the backend stays as it is (docs/vllm.md). Nothing is added for a vLLM that has the names itself, and none
if it cannot be imported: then the import in the backend's file fails, and says why.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

#: A module that newer versions do not have → the one that has its names.
MODULES = {"vllm.inputs.data": "vllm.inputs"}

#: A module, one of its former names → the module that has it.
NAMES = {("vllm.v1.metrics.loggers", "build_1_2_5_buckets"): "vllm.v1.metrics.buckets"}


def add_former_names() -> None:
    """Add the names to the modules of vLLM that are installed."""
    for former, present in MODULES.items():
        with contextlib.suppress(Exception):  # whatever vLLM raises where it cannot run
            _add_module(former, present)
    for (module, name), present in NAMES.items():
        with contextlib.suppress(Exception):
            holder = importlib.import_module(module)
            if not hasattr(holder, name):
                setattr(holder, name, getattr(importlib.import_module(present), name))


def _add_module(former: str, present: str) -> None:
    try:
        importlib.import_module(former)
    except ModuleNotFoundError as error:
        if error.name != former:
            raise
        module = importlib.import_module(present)
        sys.modules[former] = module
        parent, _, name = former.rpartition(".")
        setattr(sys.modules[parent], name, module)

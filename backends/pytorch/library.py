"""The module `torch`: imports it, and applies a model's settings to it.

It is imported when a model is loaded, because it takes seconds and hundreds of megabytes, and so that the load fails
with a clear error if PyTorch is missing.

The undocumented parts of PyTorch that this backend uses. `make test-torch` fails first after an update.

Trees of arguments and AOTInductor's packages have no public names yet; the switches of TorchScript's executor never got
any, and are those of Triton's backend.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from kernel.errors import Unsupported
from kernel.texts import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from backends.pytorch.settings import TorchSettings

#: What PyTorch and the code of models raise. All errors of PyTorch are RuntimeErrors; the others are of generated code.
TORCH_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def load_torch() -> Any:
    """Import and return the module `torch`. Raises `Unsupported` if it is not installed or cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that it needs is missing
        raise Unsupported(
            "the backend 'pytorch' needs PyTorch, which cannot be imported: "
            f"{error}. It is installed with: {install_command('pytorch')}"
        ) from error
    # Inputs of clients' regions are read-only; a model that changes its inputs gets copies of them (`torchscript.py`).
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
    return torch


def apply_settings(torch: Any, settings: TorchSettings) -> None:
    """Apply the settings of the whole process. A worker of this backend has one model instance.

    How many threads run operations at the same time can be set only once in a process, before the first of them.
    """
    if settings.intra_op_threads:
        torch.set_num_threads(settings.intra_op_threads)
    if settings.inter_op_threads:
        with contextlib.suppress(RuntimeError):  # something has computed already
            torch.set_num_interop_threads(settings.inter_op_threads)
    if not settings.cudnn:
        torch.backends.cudnn.enabled = False
    set_switches(torch, settings)


def guard_of(torch: Any, settings: TorchSettings) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what makes a context manager for each execution: without gradients, by default in inference mode."""
    guard: Callable[[], contextlib.AbstractContextManager[Any]] = (
        torch.inference_mode if settings.inference_mode else torch.no_grad
    )
    return guard


def set_switches(torch: Any, settings: TorchSettings) -> None:
    """Set TorchScript's switches that the settings have, for the whole process."""
    switches: list[tuple[str, bool | None]] = [
        ("_set_graph_executor_optimize", None if settings.optimized_execution else False),
        ("_jit_set_profiling_mode", settings.jit_profiling),
        ("_jit_set_profiling_executor", settings.jit_executor),
        ("_jit_set_texpr_fuser_enabled", settings.tensor_fuser),
    ]
    for name, value in switches:
        if value is not None:
            getattr(torch._C, name)(value)


def tree_functions() -> Any:
    """Return the module with `tree_unflatten`, `tree_leaves` and `treespec_dumps`."""
    from torch.utils import _pytree  # PyTorch is imported late

    return _pytree


def compiled_loader(path: Path, device_index: int) -> Any:
    """Return the loader of a library of AOTInductor, for a GPU, or for the CPU if the index is -1."""
    import torch._inductor as inductor  # as above

    return inductor.aoti_load_package(str(path), device_index=device_index).loader


#: Makes each `torch.load` open tensors and plain values only, also where its caller says otherwise; and the setting
#: that contradicts it.
_ONLY_TENSORS, _NOT_ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"

_refuses_pickles: ContextVar[bool] = ContextVar("_refuses_pickles", default=False)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _refuses_pickles.get():
        raise pickle.UnpicklingError(f"it would load {'.'.join(map(str, arguments))}")


@functools.cache
def _watch_pickles() -> None:
    sys.addaudithook(_refuse)  # cannot be taken back; it costs 0.1 us for each event that Python audits


@contextlib.contextmanager
def without_pickles() -> Iterator[None]:
    """Within it, a pickle that needs more than tensors and plain values raises `pickle.UnpicklingError`.

    `torch.export.load` opens such pickles: of examples, of weights and of constants, partly with the module `pickle`.
    Nothing of them is executed: what runs code has to find a function first.
    """
    _watch_pickles()
    before = {name: os.environ.pop(name, None) for name in (_ONLY_TENSORS, _NOT_ONLY_TENSORS)}
    os.environ[_ONLY_TENSORS] = "1"
    token = _refuses_pickles.set(True)
    try:
        yield
    finally:
        _refuses_pickles.reset(token)
        del os.environ[_ONLY_TENSORS]
        os.environ.update({name: value for name, value in before.items() if value is not None})

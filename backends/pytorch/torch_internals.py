"""The undocumented parts of PyTorch that this backend uses. `make test-torch` fails first after an update.

Trees of arguments and AOTInductor's packages have no public names yet; the switches of TorchScript's executor never got
any, and are those of Triton's backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from backends.pytorch.settings import TorchSettings


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

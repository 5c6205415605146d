"""The settings of a TensorRT model: on which devices it runs, and how. Pure.

Names and texts are those of Triton's TensorRT backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backends.base import as_boolean
from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from backends.base import ModelArguments

#: Settings of the command line: --backend-config=tensorrt,KEY=VALUE.
PLUGINS, VERSION_COMPATIBLE = "plugins", "version-compatible"

_STRATEGY = "execution_context_allocation_strategy"
_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")

_PRIORITIES = {"PRIORITY_MAX": "high", "PRIORITY_MIN": "low"}


class EngineSettings(msgspec.Struct, frozen=True):
    """How an instance runs its engine."""

    #: TensorRT's name: when contexts allocate the memory of their activations.
    allocation_strategy: str = "STATIC"
    #: `high`, `low`, or empty: the priority of the instance's work on its device.
    priority: str = ""
    #: Plans that contain code of the host are allowed: those built with `--version-compatible`.
    host_code_allowed: bool = False
    #: Shared libraries with plugins.
    plugins: tuple[str, ...] = ()


def engine_settings(arguments: ModelArguments) -> EngineSettings:
    """Return the settings of a model. Raises `InvalidArgument` for wrong values."""
    strategy = arguments.parameter(_STRATEGY) or _STRATEGIES[0]
    if strategy not in _STRATEGIES:
        raise InvalidArgument(
            f"Invalid value for '{_STRATEGY}': '{strategy}' for model instance '{arguments.instance_name}'. Supported "
            "values are 'STATIC' and 'ON_PROFILE_CHANGE'."
        )
    priority = str(arguments.config.get("optimization", {}).get("priority", ""))
    return EngineSettings(
        allocation_strategy=strategy,
        priority=_PRIORITIES.get(priority, ""),
        host_code_allowed=as_boolean(
            arguments.backend_config.get(VERSION_COMPATIBLE, "false"),
            f" (--backend-config=tensorrt,{VERSION_COMPATIBLE})",
        ),
        plugins=tuple(each for each in arguments.backend_config.get(PLUGINS, "").split(";") if each),
    )


def check_kind(arguments: ModelArguments) -> None:
    """Raise `InvalidArgument` unless the instance is one on a GPU."""
    if arguments.kind != "GPU":
        raise InvalidArgument(
            f"unable to load model '{arguments.model_name}', TensorRT backend supports only GPU device"
        )


def runs_on_gpu(arguments: ModelArguments) -> bool:
    """Whether the model's first instance group is on GPUs, without which Triton completes no configuration."""
    groups = arguments.config.get("instance_group", [])
    return bool(groups) and groups[0].get("kind") == "KIND_GPU"

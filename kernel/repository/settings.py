"""How the model repository is used, from the command line: what `Lifecycle` and its parts are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.observe.metrics_config import MetricsConfig

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.repository.backend_config import BackendConfigs
    from kernel.repository.host_policy import HostPolicies


class LifecycleSettings(msgspec.Struct, frozen=True):
    """What is decided at start. Names and defaults are tritonserver's, where it has them."""

    repositories: tuple[Path, ...]
    #: Whether clients may load and unload, and only `--load-model` is loaded at start.
    explicit: bool = False
    #: Seconds between two looks at the repositories in poll mode; 0 in the other modes.
    poll_s: float = 0
    auto_complete: bool = True
    #: Name of an alternative configuration: MODEL/configs/NAME.pbtxt; "" for config.pbtxt.
    config_name: str = ""
    #: Whether a name may stand in several repositories, for a model in each.
    namespacing: bool = False
    #: How many versions may be loading at the same time, and how often one is tried again.
    load_thread_count: int = 4
    load_retry_count: int = 0
    backend_configs: BackendConfigs = {}
    host_policies: HostPolicies = {}
    #: Seconds that one run of a model's warm-up may take; 0 for no limit.
    load_timeout_s: float = 0
    gpu_count: int = 0
    #: What the statistics of models measure beyond counters.
    metrics: MetricsConfig = MetricsConfig()

"""The settings of the model repository from the command line, as `Lifecycle` and its parts use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.observe.metrics_config import MetricsConfig
from kernel.repository.gpus import NoGpus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from kernel.repository.backend_config import BackendConfigs
    from kernel.repository.clouds.address import CloudAddress
    from kernel.repository.gpus import ServerGpus
    from kernel.repository.host_policy import HostPolicies
    from kernel.serving.model import ModelExtension


class LifecycleSettings(msgspec.Struct, frozen=True):
    """Settings that are fixed at start. Names and defaults are tritonserver's, if it has the setting."""

    repositories: tuple[Path | CloudAddress, ...]
    #: The folder for copies of models from clouds, which stay there; "" for a temporary one.
    copies: str = ""
    #: Explicit mode: clients may load and unload models, and only the models of `--load-model` load at start.
    explicit: bool = False
    #: Seconds between two polls of the repositories in poll mode; 0 in the other modes.
    poll_s: float = 0
    auto_complete: bool = True
    #: Name of an alternative configuration: MODEL/configs/NAME.pbtxt; "" for config.pbtxt.
    config_name: str = ""
    #: Whether several repositories may each have a model with the same name.
    namespacing: bool = False
    #: The most versions whose loads work at the same time; those that only wait do not count.
    load_thread_count: int = 4
    #: How often the load of a version is repeated after it failed.
    load_retry_count: int = 0
    backend_configs: BackendConfigs = {}
    host_policies: HostPolicies = {}
    #: Seconds that the warm-up of a version's instances may take; 0 for no limit.
    load_timeout_s: float = 0
    #: Seconds in which the last requests of a version may end that was unloaded or replaced.
    unload_timeout_s: float = 300
    #: Whether packages of a `requirements.txt` beside a Python model are installed.
    installs_requirements: bool = True
    gpus: ServerGpus = NoGpus()
    #: Returns the names of the backends that models may have, for hints.
    backends: Callable[[], Collection[str]] = tuple
    #: The latency histograms and quantiles of each model.
    metrics: MetricsConfig = MetricsConfig()
    #: What each loaded model is extended by.
    extensions: tuple[ModelExtension, ...] = ()
    #: Whether the server has a response cache, and a rate limiter.
    has_cache: bool = False
    has_limiter: bool = False

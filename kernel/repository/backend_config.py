"""Settings of backends from the command line: --backend-config=[BACKEND,]SETTING=VALUE. Pure.

A setting for one backend overrides a setting for all. As in Triton, every backend has `default-max-batch-size`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.options import RepositoryOptions

#: Backend → its settings. The settings under "" apply to all backends.
BackendConfigs = dict[str, dict[str, str]]

_DEFAULTS = {"default-max-batch-size": "4"}


def parse_backend_configs(values: Iterable[str]) -> BackendConfigs:
    """Read the values of --backend-config. Raises `InvalidArgument`."""
    configs: BackendConfigs = {}
    for value in values:
        # A comma after the equals sign belongs to the value.
        comma, equals = value.find(","), value.find("=")
        names_backend = 0 <= comma < equals or equals < 0 <= comma
        backend, given = (value[:comma], value[comma + 1 :]) if names_backend else ("", value)
        if names_backend and not backend:
            raise InvalidArgument(
                "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
                f"<setting>=<value>. Got {value}"
            )
        setting, _, chosen = given.partition("=")
        if not (setting and chosen):
            raise InvalidArgument(f"--backend-config option format is '<backend name>,<setting>=<value>'. Got {value}")
        configs.setdefault(backend, {})[setting] = chosen
    return configs


def backend_configs_of(options: RepositoryOptions) -> BackendConfigs:
    """Return the settings of all backends. --backend-directory is one of them (Triton). Raises `InvalidArgument`."""
    configs = parse_backend_configs(options.backend_config)
    if options.backend_directory is not None:
        directory = os.path.abspath(options.backend_directory)
        configs[""] = {"backend-directory": directory, **configs.get("", {})}
    return configs


def backend_config(configs: BackendConfigs, backend: str) -> dict[str, str]:
    """Return the settings that apply to `backend`."""
    return {**_DEFAULTS, **configs.get("", {}), **configs.get(backend, {})}

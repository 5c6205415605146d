"""Settings of backends from the command line: --backend-config=[BACKEND,]SETTING=VALUE. Pure.

A setting for one backend overrides a setting for all. As in Triton, every backend has `default-max-batch-size`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

#: Backend → its settings. The settings under "" apply to all backends.
BackendConfigs = dict[str, dict[str, str]]

#: The setting of all backends that says which models may be loaded from pickles (--allow-pickle).
ALLOW_PICKLE = "allow-pickle"

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


def with_directory(configs: BackendConfigs, directory: Path | None) -> BackendConfigs:
    """Return `configs` with the folder of --backend-directory, if any, as a setting of all backends (Triton)."""
    if directory is None:
        return configs
    return {**configs, "": {"backend-directory": str(directory), **configs.get("", {})}}


def with_allowed_pickles(configs: BackendConfigs, allowed: str) -> BackendConfigs:
    """Return `configs` with the value of --allow-pickle as a setting of all backends.

    It is nowhere else: not in a model's configuration, and not in --backend-config.
    """
    given = {
        backend: {name: value for name, value in settings.items() if name != ALLOW_PICKLE}
        for backend, settings in configs.items()
    }
    if allowed.strip().lower() == "false" or not allowed.strip():
        return given
    return {**given, "": {ALLOW_PICKLE: allowed, **given.get("", {})}}


def backend_config(configs: BackendConfigs, backend: str) -> dict[str, str]:
    """Return the settings that apply to `backend`."""
    return {**_DEFAULTS, **configs.get("", {}), **configs.get(backend, {})}

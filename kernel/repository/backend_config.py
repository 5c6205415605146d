"""Settings of backends from the command line: --backend-config=[BACKEND,]SETTING=VALUE. Pure.

Those of one backend go before those of all. Every backend has `default-max-batch-size`, as in Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Settings by backend; those under "" are for all.
BackendConfigs = dict[str, dict[str, str]]

_DEFAULTS = {"default-max-batch-size": "4"}


def parse_backend_configs(values: Iterable[str]) -> BackendConfigs:
    """Read the values of --backend-config. Raises `InvalidArgument`."""
    configs: BackendConfigs = {}
    for value in values:
        # A comma behind the equals sign belongs to the value.
        comma, equals = value.find(","), value.find("=")
        for_one = 0 <= comma < equals or equals < 0 <= comma
        backend, given = (value[:comma], value[comma + 1 :]) if for_one else ("", value)
        if for_one and not backend:
            raise InvalidArgument(
                "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
                f"<setting>=<value>. Got {value}"
            )
        setting, _, chosen = given.partition("=")
        if not (setting and chosen):
            raise InvalidArgument(f"--backend-config option format is '<backend name>,<setting>=<value>'. Got {value}")
        configs.setdefault(backend, {})[setting] = chosen
    return configs


def backend_config(configs: BackendConfigs, backend: str) -> dict[str, str]:
    """Return the settings that hold for `backend`."""
    return {**_DEFAULTS, **configs.get("", {}), **configs.get(backend, {})}

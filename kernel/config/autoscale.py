"""The parameter `naiad.autoscale`: how many instances a model may have, and when their number changes. Pure.

parameters { key: "naiad.autoscale" value { string_value: "min=1,max=4,up_after=500ms,down_after=30s" } }
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import BadConfig

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig

AUTOSCALE = "naiad.autoscale"

#: The form that errors show.
_FORM = "min=1,max=4,up_after=500ms,down_after=30s (max is needed; the others are the defaults)"

_NAMES = ("min", "max", "up_after", "down_after")
_COUNT = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)
_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m)", re.ASCII)
_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9}


class AutoscaleSettings(msgspec.Struct, frozen=True):
    """When a model gets another instance, and when it loses one."""

    #: The most instances.
    max: int
    #: The fewest instances, at least 1.
    min: int = 1
    #: An instance is added when requests have waited, and no instance was idle, for this time.
    up_after_ns: int = 500 * 10**6
    #: An instance is removed when there was always an idle one for this time.
    down_after_ns: int = 30 * 10**9


def autoscale_settings(config: ModelConfig) -> AutoscaleSettings | None:
    """Return the settings of a normalised configuration, or None without the parameter. Raises `BadConfig`."""
    if AUTOSCALE not in config.parameters:
        return None
    settings = _parsed(config.name, config.parameters[AUTOSCALE].string_value)
    if config.HasField("ensemble_scheduling"):
        raise BadConfig(f"parameter '{AUTOSCALE}' is for models with instances; '{config.name}' is an ensemble")
    if config.HasField("sequence_batching"):
        raise BadConfig(
            f"parameter '{AUTOSCALE}' cannot be used with sequence_batching (model '{config.name}'): a sequence stays "
            "on its instance"
        )
    groups = [group for group in config.instance_group if not group.passive]
    if len(groups) > 1 or any(len(group.gpus) > 1 for group in groups):
        raise BadConfig(
            f"parameter '{AUTOSCALE}' needs one instance group, on at most one GPU, because it changes the count of "
            f"that group; model '{config.name}' has more"
        )
    return settings


def _parsed(model: str, text: str) -> AutoscaleSettings:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (each.strip() for each in part.partition("="))
        pattern = _COUNT if name in ("min", "max") else _DURATION
        matched = pattern.fullmatch(value)
        if name not in _NAMES or name in found or matched is None:
            raise _wrong(model, text, f"'{part.strip()}'")
        found[name] = int(value) if pattern is _COUNT else int(matched[1]) * _UNITS_NS[matched[2]]
    least, most = found.get("min", 1), found.get("max")
    if most is None:
        raise _wrong(model, text, "no max")
    if least > most:
        raise _wrong(model, text, f"a min of {least} above the max of {most}")
    settings = AutoscaleSettings(most, least)
    up_after_ns = found.get("up_after", settings.up_after_ns)
    down_after_ns = found.get("down_after", settings.down_after_ns)
    if not up_after_ns or not down_after_ns:
        raise _wrong(model, text, "a time of 0")
    return AutoscaleSettings(most, least, up_after_ns, down_after_ns)


def _wrong(model: str, text: str, what: str) -> BadConfig:
    return BadConfig(
        f"parameter '{AUTOSCALE}' of model '{model}' must have the form {_FORM}, with counts from 1 to 9999 and times "
        f"in ms, s or m; found {what} in '{text}'"
    )

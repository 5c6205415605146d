"""Parses --trace-config and the deprecated trace flags into the trace settings at start. Pure.

Rules and texts are tritonserver's. `kernel.settings` has the rules for later changes by clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import BadOption
from kernel.flags.flag import BadValue, parse_integer
from kernel.settings import TRACE_LEVELS, TraceValues

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MODES = ("triton", "opentelemetry")

#: WORD of --trace-config level=WORD → level. OFF together with other levels has no effect.
_LEVEL_WORDS = {
    "false": "OFF",
    "off": "OFF",
    "true": "TIMESTAMPS",
    "on": "TIMESTAMPS",
    "min": "TIMESTAMPS",
    "max": "TIMESTAMPS",
    "timestamps": "TIMESTAMPS",
    "tensors": "TENSORS",
}

#: Settings of OpenTelemetry's batch processor that clients always see: setting, environment variable, default.
_DELAY = "bsp_schedule_delay"
_EXPORTER_DEFAULTS = (
    ("bsp_max_export_batch_size", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "512"),
    (_DELAY, "OTEL_BSP_SCHEDULE_DELAY", "5000"),
    ("bsp_max_queue_size", "OTEL_BSP_MAX_QUEUE_SIZE", "2048"),
)

_EXPORTER_SETTINGS = {"url", "resource", *(key for key, _, _ in _EXPORTER_DEFAULTS)}


def trace_values(
    config: Sequence[str], old: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> tuple[TraceValues, list[str]]:
    """Return the trace settings at start, and log lines for ignored settings and for levels without effect.

    Raises `BadOption`.

    `config` are the values of --trace-config in their order. `old` maps NAME to the values of the deprecated flags
    --trace-NAME; `config` takes precedence over `old`.
    """
    words = [*_translated(old), *map(_split, config)]
    values = TraceValues()
    levels: set[str] = set()
    notes = []
    exporter: dict[str, list[str]] = {}
    for mode, key, text in words:
        try:
            match mode, key:
                case "", "level":
                    levels.add(_level(text))
                case "", "rate":
                    values = msgspec.structs.replace(values, trace_rate=_unsigned(text))
                case "", "count":
                    values = msgspec.structs.replace(values, trace_count=_int(text))
                case "", "mode":
                    values = msgspec.structs.replace(values, trace_mode=_mode(text))
                case "triton", "file":
                    values = msgspec.structs.replace(values, trace_file=text)
                case "triton", "log-frequency":
                    values = msgspec.structs.replace(values, log_frequency=_unsigned(text))
                case "opentelemetry", _ if key in _EXPORTER_SETTINGS:
                    exporter.setdefault(key, []).append(_exporter_value(key, text))
                case _:
                    notes.append(f"--trace-config has no setting '{f'{mode},' if mode else ''}{key}': it is ignored")
        except BadValue as error:
            raise BadOption(f"--trace-config {f'{mode},' if mode else ''}{key}: {error}") from None
    on = tuple(level for level in TRACE_LEVELS if level in levels and level != "OFF")
    values = msgspec.structs.replace(values, trace_level=on or ("OFF",))
    if on and (lacking := _lacking(values)):
        notes.append(f"--trace-config level={','.join(on)} has no effect: {lacking}")
    if values.trace_mode == "opentelemetry":
        for key, variable, default in _EXPORTER_DEFAULTS:
            exporter.setdefault(key, [environment.get(variable, default)])
            _check_size(key, exporter[key][-1])
        values = msgspec.structs.replace(values, exporter=tuple((key, tuple(texts)) for key, texts in exporter.items()))
    return values, notes


def _exporter_value(key: str, text: str) -> str:
    """Return the value of a setting of OpenTelemetry. Raises `BadValue` for one that no export could use."""
    if key == "url":
        scheme, there, rest = text.rpartition("://")
        if scheme not in (("http", "https") if there else ("",)) or not rest.partition("/")[0]:
            raise BadValue(f"expected [http://]HOST:PORT/PATH, such as localhost:4318/v1/traces, got {text}")
    if key == "resource" and text.find("=") < 1:
        raise BadValue(f"expected KEY=VALUE, got {text}")
    return text


def _check_size(key: str, text: str) -> None:
    """Raise `BadOption` unless a setting of OpenTelemetry's batches is a number above 0, or a delay of 0."""
    try:
        number = _int(text)
    except BadValue as error:
        raise BadOption(f"--trace-config opentelemetry,{key}: {error}") from None
    least = 0 if key == _DELAY else 1
    if number < least:
        raise BadOption(f"--trace-config opentelemetry,{key}: expected a number from {least} on, got {text}")


def _lacking(values: TraceValues) -> str:
    """Return why nothing is traced with these settings, and what to do; empty if that is not so."""
    if values.trace_mode != "triton":
        return ""
    if not values.trace_file:
        return "trace file name is not given; add --trace-config triton,file=FILE"
    return "" if values.trace_rate else "sample rate must be non-zero; give --trace-config rate=N"


def _split(text: str) -> tuple[str, str, str]:
    """Return mode, key and value of a setting; its format was checked before."""
    before, _, value = text.partition("=")
    mode, _, key = before.rpartition(",")
    if not mode:
        return "", key, value
    try:
        return _mode(mode), key, value
    except BadValue as error:
        raise BadOption(f"--trace-config: {error}") from None


def _translated(old: Mapping[str, Sequence[str]]) -> Iterable[tuple[str, str, str]]:
    """Return the settings of the deprecated flags as mode, key and value of --trace-config."""
    for name, texts in old.items():
        mode = "triton" if name in ("file", "log-frequency") else ""
        for text in texts:
            yield mode, name, text


def _level(text: str) -> str:
    level = _LEVEL_WORDS.get(text.lower())
    if level is None:
        raise BadValue(f"invalid value for trace level option: {text}; levels are {', '.join(TRACE_LEVELS)}")
    return level


def _mode(text: str) -> str:
    if text.lower() not in _MODES:
        raise BadValue(
            f"invalid value for trace mode option: {text}. "
            'Available options are "triton" and "opentelemetry"'
        )  # fmt: skip
    return text.lower()


def _int(text: str) -> int:
    number = parse_integer(text)
    if not -(2**31) <= number < 2**31:
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def _unsigned(text: str) -> int:
    """Return a number as tritonserver stores it: unsigned, so that a negative number becomes very large."""
    return _int(text) % 2**32

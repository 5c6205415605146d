"""Trace and log settings as clients read and change them while the server runs.

Rules, texts and leniencies are Triton's (trace and logging extensions), but that a change that is refused
changes nothing at all. What a trace records is not decided here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument, Unavailable, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

#: In the order in which settings show them.
TRACE_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_OFF = ("OFF",)

#: What is said wherever traces are asked for.
NOT_RECORDED = "traces are not recorded yet; the settings are kept and shown to clients (/v2/trace/setting)"

#: What Triton calls the range of a number that is out of it.
_RANGES = {
    "trace_rate": "[ 0, 4294967295 ]",
    "trace_count": "[ -1, 2147483647 ]",
    "log_frequency": "[ 0, 4294967295 ]",
}

#: Triton reads numbers with C++'s `stoi`: white space before and text behind do not matter.
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)([0-9]+)", re.ASCII)

LOG_FORMATS = ("default", "ISO8601", "json")


class TraceValues(msgspec.Struct, frozen=True):
    """One complete set of trace settings."""

    #: OFF, or some of the other levels.
    trace_level: tuple[str, ...] = _OFF
    #: One of so many requests is traced.
    trace_rate: int = 1000
    #: How many are traced at most; -1 for no end.
    trace_count: int = -1
    log_frequency: int = 0
    trace_file: str = ""
    #: triton or opentelemetry.
    trace_mode: str = "triton"
    #: Settings of OpenTelemetry's exporter as they were given at start: names, each with its values.
    exporter: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def as_dict(self) -> dict[str, list[str]]:
        """Return the settings that belong to the mode, in Triton's order; every value is a list of texts."""
        shown = {
            "trace_level": list(self.trace_level),
            "trace_rate": [str(self.trace_rate)],
            "trace_count": [str(self.trace_count)],
        }
        if self.trace_mode == "triton":
            shown["log_frequency"] = [str(self.log_frequency)]
            shown["trace_file"] = [self.trace_file]
        shown["trace_mode"] = [self.trace_mode]
        if self.trace_mode == "opentelemetry":
            shown.update((name, list(values)) for name, values in self.exporter)
        return shown


#: A change: the new texts of a setting, or None to clear it back to what it inherits.
TraceChange = dict[str, list[str] | None]

#: What the server or a model has set itself, by the name of the setting.
_Own = dict[str, object]


class TraceSettings:
    """Settings of the server and of single models, which inherit what they do not set themselves."""

    def __init__(self, startup: TraceValues | None = None, warn: Callable[[str], object] | None = None) -> None:
        """`warn` is called with a line for the log after each change that asks for traces: none is recorded yet."""
        self._startup = startup or TraceValues()
        self._warn = warn
        self._server: _Own = {}
        self._models: dict[str, _Own] = {}

    def get(self, model: str = "") -> TraceValues:
        """Return the settings of a model, or of the server."""
        return self._values(self._server, self._models.get(model, {}))

    def update(self, change: TraceChange, model: str = "", *, got: str = "got:") -> TraceValues:
        """Apply `change` to a model or to the server and return the result; all of it or nothing.

        `got` is what the front door's error has before a trace count that is too low.
        """
        values = self._update(change, model, got)
        if change and values.trace_level != _OFF and self._warn is not None:
            whose = f"model '{model}'" if model else "the server"
            self._warn(f"trace settings of {whose}: trace level {', '.join(values.trace_level)}, but {NOT_RECORDED}")
        return values

    def _update(self, change: TraceChange, model: str, got: str) -> TraceValues:
        own = _changed(self._models.get(model, {}) if model else self._server, change, got)
        if model:
            values = self._values(self._server, own)
            _check(values)
            if own:
                self._models[model] = own
            else:
                self._models.pop(model, None)
            return values
        values = self._values(own, {})
        _check(values)
        for inheriting in self._models.values():
            _check(self._values(own, inheriting))
        self._server = own
        return values

    def _values(self, server: _Own, model: _Own) -> TraceValues:
        return msgspec.structs.replace(self._startup, **{**server, **model})


def _check(values: TraceValues) -> None:
    """Raise `InvalidArgument` for what could not be traced. Where tracing is off nothing is wrong."""
    if values.trace_level == _OFF:
        return
    if values.trace_rate == 0:
        raise InvalidArgument("Attempting to set invalid trace setting :sample rate must be non-zero")
    if values.trace_mode == "triton" and not values.trace_file:
        raise InvalidArgument("Attempting to set invalid trace setting :trace file name is not given")


def _changed(own: _Own, change: TraceChange, got: str) -> _Own:
    result = dict(own)
    for name, texts in change.items():
        if texts is None:
            result.pop(name, None)
        elif name == "trace_level":
            levels = _parse_levels(texts)
            if levels:
                result[name] = levels
        elif name in _RANGES:
            result[name] = _parse_number(name, texts, got)
        elif name == "trace_file":
            raise Unsupported("trace file location can not be updated through network protocol")
        else:
            raise Unsupported(f"unsupported trace setting: {name}")
    return result


def _parse_levels(texts: list[str]) -> tuple[str, ...]:
    """Return the levels among `texts`; where there is none, nothing is changed."""
    if "OFF" in texts:
        if len(texts) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return _OFF
    return tuple(level for level in TRACE_LEVELS if level in texts)


def _parse_number(name: str, texts: list[str], got: str) -> int:
    if len(texts) != 1:
        raise InvalidArgument(f"expect only 1 value for '{name}'")
    found = _NUMBER.match(texts[0])
    if found is None:
        raise InvalidArgument(f"Unable to parse '{name}', got: {texts[0]}")
    digits = found[2].lstrip("0") or "0"
    number = int(digits) if len(digits) <= 10 else 2**32
    number = -number if found[1] == "-" else number
    if not -(2**31) <= number < 2**31:
        raise InvalidArgument(f"Unable to parse '{name}', value is out of range {_RANGES[name]}, got: {texts[0]}")
    if name != "trace_count":
        return number % 2**32  # Triton keeps it as an unsigned number: -1 is the largest
    if number < -1:
        raise InvalidArgument(f"Unable to parse 'trace_count'. Expecting value >= -1, {got}{number}")
    return number


class LogValues(msgspec.Struct, frozen=True):
    """Log settings, in the order in which Triton shows them."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    #: One of LOG_FORMATS.
    log_format: str = "default"


class LogSettings:
    """The server's log settings. `kernel.observe.logs` asks for them with every line."""

    def __init__(self, startup: LogValues | None = None) -> None:
        self.values = startup or LogValues()

    def update(self, change: dict[str, bool | int | str], *, format_name: str = "log_format") -> LogValues:
        """Apply settings whose types the front door has checked; all of them or none.

        `format_name` is what the front door's error calls the format.
        """
        if "log_file" in change:
            raise Unsupported("log file location can not be updated through network protocol")
        form = change.get("log_format", "default")
        if form not in LOG_FORMATS:
            raise Unavailable(f"invalid argument for {format_name}, got: {form}")
        if "log_verbose_level" in change:
            # Triton keeps it in 32 bits with a sign, and takes what is below zero for zero.
            level = int(change["log_verbose_level"]) % 2**32
            change = {**change, "log_verbose_level": level if level < 2**31 else 0}
        self.values = msgspec.structs.replace(self.values, **change)
        return self.values

"""Trace and log settings, which clients read and change while the server runs.

Rules and texts are Triton's (trace and logging extensions), with one difference: a change with an error changes
nothing at all. This module only stores the settings; `kernel.records.tracer` and `kernel.observe.logs` act on them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument, Unavailable, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

#: In the order of responses.
TRACE_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_OFF = ("OFF",)

#: Number setting → its range in Triton's errors.
_RANGES = {
    "trace_rate": "[ 0, 4294967295 ]",
    "trace_count": "[ -1, 2147483647 ]",
    "log_frequency": "[ 0, 4294967295 ]",
}

#: Triton reads numbers with C++'s `stoi`, which ignores white space before a number and any text after it.
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)([0-9]+)", re.ASCII)

LOG_FORMATS = ("default", "ISO8601", "json")


class TraceValues(msgspec.Struct, frozen=True):
    """A complete set of trace settings."""

    #: ("OFF",), or some of the other levels.
    trace_level: tuple[str, ...] = _OFF
    #: One of this many requests is traced; 0 for those only whose clients ask for it (OpenTelemetry).
    trace_rate: int = 1000
    #: The most requests that are traced; -1 for no limit.
    trace_count: int = -1
    #: The number of traces after which a new trace file begins; 0 for a single file.
    log_frequency: int = 0
    trace_file: str = ""
    #: triton or opentelemetry.
    trace_mode: str = "triton"
    #: Settings of OpenTelemetry's exporter from the command line: (name, values).
    exporter: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def as_dict(self) -> dict[str, list[str]]:
        """Return the settings of the current mode, in Triton's order. Every value is a list of texts."""
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


#: Setting → its new texts, or None to clear it, so that it has the inherited value again.
TraceChange = dict[str, list[str] | None]

#: Setting → value, of the settings that were changed for the server or for one model.
_Own = dict[str, object]


def _uncounted(model: str) -> None:
    """Return None: no traces of `model` are counted."""


def _ignored(model: str) -> None:
    """Ignore a change."""


class TraceSettings:
    """The settings of the server and of single models. A model inherits the settings that it does not change."""

    def __init__(self, startup: TraceValues | None = None) -> None:
        self._startup = startup or TraceValues()
        self._server: _Own = {}
        self._models: dict[str, _Own] = {}
        #: Returns how many more requests may be traced with the settings of a model, "" for the server; None if nobody
        #: counts them. Set by who samples requests.
        self.remaining: Callable[[str], int | None] = _uncounted
        #: Called with the model, "" for the server, whose settings have changed.
        self.on_change: Callable[[str], object] = _ignored
        #: Whether nothing is traced before a setting is changed.
        self._stopped = False

    @property
    def models(self) -> Collection[str]:
        """The models with settings of their own."""
        return self._models

    def get(self, model: str = "") -> TraceValues:
        """Return the settings of `model`, or of the server if it is empty. The count is what remains of it (Triton):
        0 where nothing more is traced."""
        own = self._models.get(model)
        values = self._values(self._server, own or {})
        remaining = 0 if self._stopped else self.remaining(model if own else "")
        if remaining is None or remaining == values.trace_count:
            return values
        return msgspec.structs.replace(values, trace_count=remaining)

    def update(self, change: TraceChange, model: str = "", *, got: str = "got:") -> TraceValues:
        """Apply `change` to `model`, or to the server if it is empty, and return the new settings as `get`.

        `got` is the text before a wrong trace count in the front door's error. Raises `ServingError`; then nothing
        has changed.
        """
        self._note_remaining()
        self._update(change, model, got)
        if change:
            self._stopped = False
            self.on_change(model)
        return self.get(model)

    def stop(self) -> None:
        """Show that nothing is traced before a setting is changed, whatever it is."""
        self._note_remaining()
        self._stopped = True

    def _note_remaining(self) -> None:
        """Put what remains of counts in their place: a change of another setting does not begin them again."""
        for name, own in (("", self._server), *self._models.items()):
            if "trace_count" in own and (remaining := self.remaining(name)) is not None:
                own["trace_count"] = remaining

    def _update(self, change: TraceChange, model: str, got: str) -> None:
        own = _changed(self._models.get(model, {}) if model else self._server, change, got)
        if model:
            _check(self._values(self._server, own))
            if own:
                self._models[model] = own
            else:
                self._models.pop(model, None)
            return
        _check(self._values(own, {}))
        for inheriting in self._models.values():
            _check(self._values(own, inheriting))
        self._server = own

    def _values(self, server: _Own, model: _Own) -> TraceValues:
        return msgspec.structs.replace(self._startup, **{**server, **model})


def _check(values: TraceValues) -> None:
    """Raise `InvalidArgument` if tracing is on and cannot work with these settings."""
    if values.trace_level == _OFF:
        return
    if values.trace_rate == 0 and values.trace_mode == "triton":
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
    """Return the known levels in `texts`. Raises `InvalidArgument` for OFF together with other levels."""
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
        return number % 2**32  # Triton stores an unsigned number: -1 is the largest
    if number < -1:
        raise InvalidArgument(f"Unable to parse 'trace_count'. Expecting value >= -1, {got}{number}")
    return number


class LogValues(msgspec.Struct, frozen=True):
    """Log settings, in the order of Triton's responses."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    #: One of LOG_FORMATS.
    log_format: str = "default"


class LogSettings:
    """The server's log settings. `kernel.observe.logs` reads them for every line."""

    def __init__(self, startup: LogValues | None = None) -> None:
        self.values = startup or LogValues()

    def update(self, change: dict[str, bool | int | str], *, format_name: str = "log_format") -> LogValues:
        """Apply `change`, whose types the front door has checked, and return the new settings.

        `format_name` is the name of the format in the front door's error. Raises `ServingError`; then nothing has
        changed.
        """
        if "log_file" in change:
            raise Unsupported("log file location can not be updated through network protocol")
        log_format = change.get("log_format", "default")
        if log_format not in LOG_FORMATS:
            raise Unavailable(f"invalid argument for {format_name}, got: {log_format}")
        if "log_verbose_level" in change:
            # Triton stores it as a signed 32-bit number, and a negative level means 0.
            level = int(change["log_verbose_level"]) % 2**32
            change = {**change, "log_verbose_level": level if level < 2**31 else 0}
        self.values = msgspec.structs.replace(self.values, **change)
        return self.values

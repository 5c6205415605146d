"""Trace and log settings as clients read and change them while the server runs.

Rules and texts are Triton's (trace and logging extensions). What a trace records is not decided here.
"""

from __future__ import annotations

import msgspec

from kernel.errors import InvalidArgument, Unavailable, Unsupported

TRACE_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_NUMBERS = ("trace_rate", "trace_count", "log_frequency")


class TraceValues(msgspec.Struct, frozen=True):
    """One complete set of trace settings."""

    trace_level: tuple[str, ...] = ("OFF",)
    trace_rate: int = 1000
    trace_count: int = -1
    log_frequency: int = 0
    trace_file: str = ""
    trace_mode: str = "triton"

    def as_dict(self) -> dict[str, list[str]]:
        """Return the settings as both protocols show them: every value is a list of texts."""
        return {
            "log_frequency": [str(self.log_frequency)],
            "trace_count": [str(self.trace_count)],
            "trace_file": [self.trace_file],
            "trace_level": list(self.trace_level),
            "trace_mode": [self.trace_mode],
            "trace_rate": [str(self.trace_rate)],
        }


#: A change: the new texts of a setting, or None to clear it back to what it inherits.
TraceChange = dict[str, list[str] | None]


class TraceSettings:
    """Settings of the server and of single models, which inherit what they do not set themselves."""

    def __init__(self, startup: TraceValues | None = None) -> None:
        self._startup = startup or TraceValues()
        self._server: dict[str, object] = {}
        self._models: dict[str, dict[str, object]] = {}

    def get(self, model: str = "") -> TraceValues:
        """Return the settings of a model, or of the server."""
        return self._values({**self._server, **self._models.get(model, {})})

    def update(self, change: TraceChange, model: str = "") -> TraceValues:
        """Apply `change` to a model or to the server and return the result; all of it or nothing."""
        own = dict(self._models.get(model, {}) if model else self._server)
        for name, texts in change.items():
            if texts is None:
                own.pop(name, None)
            else:
                own[name] = _parse_trace(name, texts)
        inherited = {**self._server, **own} if model else own
        values = self._values(inherited)
        if values.trace_rate == 0:
            raise InvalidArgument("Attempting to set invalid trace setting :sample rate must be non-zero")
        if values.trace_level != ("OFF",) and values.trace_mode == "triton" and not values.trace_file:
            raise InvalidArgument("Attempting to set invalid trace setting :trace file name is not given")
        if not model:
            self._server = own
        elif own:
            self._models[model] = own
        else:
            self._models.pop(model, None)
        return values

    def _values(self, changed: dict[str, object]) -> TraceValues:
        return msgspec.structs.replace(self._startup, **changed)


def _parse_trace(name: str, texts: list[str]) -> object:
    if name == "trace_level":
        if "OFF" in texts:
            if len(texts) > 1:
                raise InvalidArgument("Expect only one trace level 'OFF' is specified")
            return ("OFF",)
        return tuple(text for text in texts if text in TRACE_LEVELS) or ("OFF",)
    if name == "trace_file":
        raise Unsupported("trace file location can not be updated through network protocol")
    if name not in _NUMBERS:
        raise Unsupported(f"unsupported trace setting: {name}")
    if len(texts) != 1:
        raise InvalidArgument(f"expect only 1 value for '{name}'")
    number = _parse_number(name, texts[0])
    if name == "trace_count" and number < -1:
        raise InvalidArgument(f"Unable to parse 'trace_count'. Expecting value >= -1, got:{number}")
    if name != "trace_count" and number < 0:
        raise InvalidArgument(f"Unable to parse '{name}', got: {texts[0]}")
    return number


def _parse_number(name: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidArgument(f"Unable to parse '{name}', got: {text}")
    number = int(digits) if len(digits) <= 20 else 2**64
    number = -number if text.startswith("-") else number
    if not -(2**31) <= number < 2**31:
        raise InvalidArgument(f"Unable to parse '{name}', value is out of range [ 0, 4294967295 ], got: {text}")
    return number


class LogValues(msgspec.Struct, frozen=True):
    """Log settings, in the order in which Triton shows them."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"


class LogSettings:
    """The server's log settings. `kernel.observe.logs` asks for them with every line."""

    def __init__(self, startup: LogValues | None = None) -> None:
        self.values = startup or LogValues()

    def update(self, change: dict[str, bool | int | str]) -> LogValues:
        """Apply settings whose types the front door has checked; all of them or none."""
        if "log_file" in change:
            raise Unsupported("log file location can not be updated through network protocol")
        form = change.get("log_format", "default")
        if form not in ("default", "ISO8601"):
            raise Unavailable(f"invalid argument for log_format, got: {form}")
        self.values = msgspec.structs.replace(self.values, **change)
        return self.values

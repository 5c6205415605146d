"""`Flag` describes a flag of the command line, and `Kind` its values: their name in the help, and their parser. Pure.

An error has tritonserver's text if there is one; otherwise its text names the expected value.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from kernel.records.record_settings import BadRecordSetting, RecordSettings, parse_record_settings
from kernel.repository.clouds.address import BadAddress, is_address, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.repository.clouds.address import CloudAddress


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag of `naiad run`. Name and meaning are tritonserver's, if it has the flag."""

    #: Without the dashes.
    name: str
    kind: Kind
    #: Text for the help; empty if the flag has no effect.
    help: str = ""
    #: Path of the option in `ServerOptions`, such as "http.max_input_size"; empty if the flag has no effect.
    option: str = ""
    #: The flag can be given several times, and the option is a tuple.
    repeat: bool = False
    #: tritonserver does not have the flag, or has another default.
    ours: bool = False
    #: A second name, which the help does not show.
    alias: str = ""
    #: The default that the help shows, if the option's default is not the right text.
    default: str = ""
    #: A log line for each use of the flag: why it has no effect, or which flag replaces it.
    note: str = ""
    #: For a flag without effect: the value that already describes this server, so that no note is needed.
    silent_value: object = None


class FlagGroup(msgspec.Struct, frozen=True):
    """Flags that the help shows together, under a title and an explanation."""

    title: str
    text: str
    flags: tuple[Flag, ...]


_INT32 = 2**31

_INT64 = 2**63

#: The smallest arena in bytes; in a smaller one hardly any request would find room.
_LEAST_CAPACITY = 1 << 20


class BadValue(Exception):
    """A text is not a value of its kind. The message is one line that names the expected value."""


class Kind(msgspec.Struct, frozen=True):
    """A kind of value. `parse` raises `BadValue`."""

    #: The name of the value in the help; empty for a flag without a value.
    metavar: str
    parse: Callable[[str], object]


def parse_switch(text: str) -> bool:
    """Parse a boolean in the words that tritonserver accepts."""
    match text.lower():
        case "true" | "on" | "1":
            return True
        case "false" | "off" | "0":
            return False
    raise BadValue(f"'{text}' is neither true nor false")


def parse_integer(text: str) -> int:
    """Parse a signed 64-bit integer."""
    if re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII) is None:
        raise BadValue(f"'{text}' is not a whole number")
    # Python refuses to convert thousands of digits; such numbers are out of range.
    number = int(text) if len(text) < 25 else _INT64
    if not -_INT64 <= number < _INT64:
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def integer(
    lowest: int | None = None, highest: int = _INT32 - 1, *, raised_to: int | None = None, metavar: str = "N"
) -> Kind:
    """Return the kind of integers from `lowest` to `highest`.

    Numbers below `raised_to` become `raised_to` without an error, as in tritonserver.
    """

    def parse(text: str) -> int:
        number = parse_integer(text)
        if raised_to is not None:
            number = max(raised_to, number)
        if lowest is not None and number < lowest:
            raise BadValue(f"'{text}' is too low: it must be at least {lowest}")
        if not -_INT32 <= number <= highest:
            raise BadValue(f"Provided option value is out of bound. Got {text}; the highest is {highest}")
        return number

    return Kind(metavar, parse)


def one_of(*words: str, any_case: bool = False) -> Kind:
    """Return the kind whose values are `words`."""

    def parse(text: str) -> str:
        word = text.lower() if any_case else text
        if word not in words:
            raise BadValue(f"'{text}' is not one of {', '.join(words)}")
        return word

    return Kind("|".join(words), parse)


def setting(metavar: str, expected: str, *, name: Literal["needed", "allowed", "refused"], unnamed: str = "") -> Kind:
    """Return the kind of texts such as `local,size=1024`; the parser returns the text unchanged.

    `name` says whether a name before the comma is needed. The error of a text in another format is `expected`, the
    error of a text with a missing name is `unnamed`.
    """

    def parse(text: str) -> str:
        before, _, value = text.partition("=")
        owner, comma, key = before.rpartition(",")
        if unnamed and not owner and (comma or name == "needed"):
            raise BadValue(f"{unnamed}. Got {text}")
        if not (key and value) or (comma and name == "refused") or (not owner and name == "needed"):
            raise BadValue(f"{expected}. Got {text}")
        return text

    return Kind(metavar, parse)


def pair(metavar: str, separator: str, first: Kind, second: Kind) -> Kind:
    """Return the kind of texts such as `0:64`: a value of `first`, `separator`, a value of `second`."""

    def parse(text: str) -> str:
        left, found, right = text.partition(separator)
        if not found:
            raise BadValue(f"'{text}' is not two values with '{separator}' between them")
        first.parse(left)
        second.parse(right)
        return text

    return Kind(metavar, parse)


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadValue(f"'{text}' is not a number") from None


def _parse_duration(text: str) -> float:
    # Nine digits are thirty years.
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text, re.ASCII) is None:
        raise BadValue(f"'{text}' is not a number of seconds such as 2.5")
    return float(text)


def _parse_verbosity(text: str) -> int:
    match text.lower():
        case "true":
            return 1
        case "false":
            return 0
    return max(0, parse_integer(text))


def _parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise BadValue("the path is empty" if not text else "the path contains a NUL character")
    return Path(text)


def _parse_repository(text: str) -> Path | CloudAddress:
    if not is_address(text):
        return _parse_path(text)
    try:
        return parse_address(text)
    except BadAddress as error:
        raise BadValue(str(error)) from None


def _parse_name(text: str) -> str:
    if not text:
        raise BadValue("the name is empty")
    return text


def _parse_capacity(text: str) -> int:
    number = parse_integer(text)
    if number < _LEAST_CAPACITY:
        raise BadValue(f"'{text}' is too low: it must be at least {_LEAST_CAPACITY}")
    return 1 << (number.bit_length() - 1)


def _parse_budget(text: str) -> int:
    number = parse_integer(text)
    if number and number < _LEAST_CAPACITY:
        raise BadValue(f"'{text}' is too low: it must be 0 or at least {_LEAST_CAPACITY}")
    return number


def _parse_resource(text: str) -> str:
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise BadValue(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    for number in parts[1:]:
        parse_integer(number)
    return text


def _parse_recording(text: str) -> RecordSettings:
    try:
        return parse_record_settings(text)
    except BadRecordSetting as error:
        raise BadValue(str(error)) from None


SWITCH = Kind("true|false", parse_switch)


def parse_host_port(text: str, lowest: int = 1) -> tuple[str, int]:
    """Parse `HOST:PORT`, with an IPv6 address as `[::1]:7000`, and a port from `lowest` on."""
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or not lowest <= int(port) < 1 << 16:
        raise BadValue(f"'{text}' is no address of the form HOST:PORT, with a port from {lowest} to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _parse_addresses(text: str) -> tuple[tuple[str, int], ...]:
    found = tuple(parse_host_port(each.strip()) for each in text.split(","))
    if len(set(found)) < len(found):
        raise BadValue(f"'{text}' has the same address twice")
    return found


def _parse_names(text: str) -> tuple[str, ...]:
    found = tuple(each.strip() for each in text.split(","))
    if not all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", each, re.ASCII) for each in found) or len(set(found)) < len(found):
        raise BadValue(f"'{text}' must be different names with commas between")
    return found


ADDRESSES = Kind("HOST:PORT[,...]", _parse_addresses)

LAUNCHERS = Kind("NAME[,NAME...]", _parse_names)

#: A switch that sets its option to the opposite.
INVERTED_SWITCH = Kind("true|false", lambda text: not parse_switch(text))

#: A flag without a value that sets its option to false.
OFF = Kind("", lambda _: False)

TEXT = Kind("TEXT", str)

NAME = Kind("NAME", _parse_name)

FILE = Kind("FILE", _parse_path)

FOLDER = Kind("FOLDER", _parse_path)

REPOSITORY = Kind("FOLDER|ADDRESS", _parse_repository)

PORT = integer(0, 65535, metavar="PORT")

NUMBER = Kind("NUMBER", _parse_number)

#: Seconds, also parts of one.
DURATION = Kind("SECONDS", _parse_duration)

BYTES = integer(raised_to=0, highest=_INT64 - 1, metavar="BYTES")

#: The size of an arena in bytes, rounded down to a power of two.
CAPACITY = Kind("BYTES", _parse_capacity)

#: A limit of memory in bytes; 0 for half of the memory of the machine.
BUDGET = Kind("BYTES", _parse_budget)

#: Like tritonserver, the parser also accepts true and false.
VERBOSITY = Kind("LEVEL", _parse_verbosity)

RESOURCE = Kind("NAME:COUNT[:DEVICE]", _parse_resource)

BACKEND_SETTING = setting(
    "[BACKEND,]KEY=VALUE",
    "--backend-config option format is '<backend name>,<setting>=<value>'",
    name="allowed",
    unnamed="No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
    "<setting>=<value>",
)

CACHE_SETTING = setting(
    "CACHE,KEY=VALUE",
    "--cache-config option format is '<cache name>,<setting>=<value>'",
    name="needed",
    unnamed="No cache specified. --cache-config option format is <cache name>,<setting>=<value>",
)

METRICS_SETTING = setting("KEY=VALUE", "--metrics-config option format is <setting>=<value>", name="refused")

HOST_POLICY = setting(
    "POLICY,KEY=VALUE", "--host-policy option format is '<policy name>,<setting>=<value>'", name="needed"
)

TRACE_SETTING = setting(
    "[MODE,]KEY=VALUE",
    "--trace-config option format is '<trace mode>,<setting>=<value>'",
    name="allowed",
    unnamed="No trace mode specified. --trace-config option format is <trace mode>,<setting>=<value> or "
    "<setting>=<value>",
)

RECORDING = Kind("DIR[,KEY=VALUE...]", _parse_recording)

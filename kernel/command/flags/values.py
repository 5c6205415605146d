"""Kinds of values that flags take: how the help calls them, and how a text becomes one. Pure.

Where tritonserver has a text for a wrong value it is the text here, else the message says what was expected.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

_INT32 = 2**31
_INT64 = 2**63

#: Bytes without which hardly any request would find room.
_LEAST_CAPACITY = 1 << 20


class BadValue(Exception):
    """A text is no value of its kind; the message is one line that says what was expected."""


class Kind(msgspec.Struct, frozen=True):
    """A kind of value. `parse` raises `BadValue`."""

    #: What stands for the value in the help; empty for a flag that takes none.
    metavar: str
    parse: Callable[[str], object]


def parse_switch(text: str) -> bool:
    """Return what `text` means in the words that tritonserver takes."""
    match text.lower():
        case "true" | "on" | "1":
            return True
        case "false" | "off" | "0":
            return False
    raise BadValue(f"'{text}' is neither true nor false")


def parse_whole(text: str) -> int:
    """Return a whole number of 64 bits."""
    if re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII) is None:
        raise BadValue(f"'{text}' is not a whole number")
    # Python refuses to convert thousands of digits, which are out of bound anyway.
    number = int(text) if len(text) < 25 else _INT64
    if not -_INT64 <= number < _INT64:
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def whole(
    lowest: int | None = None, highest: int = _INT32 - 1, *, raised_to: int | None = None, metavar: str = "N"
) -> Kind:
    """Return the kind of whole numbers from `lowest` to `highest`.

    Where tritonserver silently raises what is too low, so does `raised_to`.
    """

    def parse(text: str) -> int:
        number = parse_whole(text)
        if raised_to is not None:
            number = max(raised_to, number)
        if lowest is not None and number < lowest:
            raise BadValue(f"'{text}' is too low: it must be at least {lowest}")
        if not -_INT32 <= number <= highest:
            raise BadValue(f"Provided option value is out of bound. Got {text}; the highest is {highest}")
        return number

    return Kind(metavar, parse)


def one_of(*words: str, any_case: bool = False) -> Kind:
    """Return the kind that is one of `words`."""

    def parse(text: str) -> str:
        wanted = text.lower() if any_case else text
        if wanted not in words:
            raise BadValue(f"'{text}' is none of {', '.join(words)}")
        return wanted

    return Kind("|".join(words), parse)


def setting(metavar: str, expected: str, *, name: Literal["needed", "allowed", "refused"], unnamed: str = "") -> Kind:
    """Return the kind of texts such as `local,size=1024`, which stay as they are.

    `name` is about what stands before the comma. A text of another form is answered with `expected`, one
    whose name is missing with `unnamed`.
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
    """Return the kind of texts such as `0:64`: a value of each kind with `separator` between."""

    def parse(text: str) -> str:
        left, found, right = text.partition(separator)
        if not found:
            raise BadValue(f"'{text}' is not two values with '{separator}' between")
        first.parse(left)
        second.parse(right)
        return text

    return Kind(metavar, parse)


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadValue(f"'{text}' is not a number") from None


def _parse_verbosity(text: str) -> int:
    match text.lower():
        case "true":
            return 1
        case "false":
            return 0
    return max(0, parse_whole(text))


def _parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise BadValue("the path is empty" if not text else "the path has a NUL character in it")
    return Path(text)


def _parse_name(text: str) -> str:
    if not text:
        raise BadValue("the name is empty")
    return text


def _parse_capacity(text: str) -> int:
    number = parse_whole(text)
    if number < _LEAST_CAPACITY:
        raise BadValue(f"'{text}' is too low: it must be at least {_LEAST_CAPACITY}")
    return 1 << (number.bit_length() - 1)


def _parse_resource(text: str) -> str:
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise BadValue(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    for number in parts[1:]:
        parse_whole(number)
    return text


SWITCH = Kind("true|false", parse_switch)
#: A switch whose meaning here is the opposite.
INVERTED_SWITCH = Kind("true|false", lambda text: not parse_switch(text))
#: A flag without a value, which switches something off.
OFF = Kind("", lambda _: False)
TEXT = Kind("TEXT", str)
NAME = Kind("NAME", _parse_name)
FILE = Kind("FILE", _parse_path)
FOLDER = Kind("FOLDER", _parse_path)
PORT = whole(0, 65535, metavar="PORT")
NUMBER = Kind("NUMBER", _parse_number)
BYTES = whole(raised_to=0, highest=_INT64 - 1, metavar="BYTES")
#: Bytes of memory in which blocks are allocated: the power of two below.
CAPACITY = Kind("BYTES", _parse_capacity)
#: tritonserver takes true and false for the level, too.
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

"""Kinds of values of request fields: functions that return a value, or raise `Mismatch` with pydantic's text. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocols.openai.errors import Mismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    #: Returns the value as the server uses it. Raises `Mismatch`.
    Check = Callable[[Any], Any]

#: Limits of stop words. The search for them is linear in the text, for each of them.
MAX_STOP_WORDS = 16
MAX_STOP_LENGTH = 256


def anything(value: Any) -> Any:
    """Accept any JSON."""
    return value


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Mismatch("bool_type", "Input should be a valid boolean")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise Mismatch("string_type", "Input should be a valid string")
    return value


def json_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Mismatch("dict_type", "Input should be a valid dictionary")
    return value


def json_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Mismatch("list_type", "Input should be a valid list")
    return value


def filled_list(value: Any) -> list[Any]:
    """Accept a list with at least one item."""
    if not json_list(value):
        raise Mismatch("too_short", "List should have at least 1 item after validation, not 0")
    return json_list(value)


def number(lowest: float | None = None, highest: float | None = None) -> Check:
    """Return the check of a number within bounds, which belong to the range."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Mismatch("float_type", "Input should be a valid number")
        _within(value, lowest, highest)
        return value

    return check


def integer(lowest: int | None = None, highest: int | None = 2**63 - 1) -> Check:
    """Return the check of an integer within bounds. A boolean is none, and 1.0 is 1."""

    def check(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise Mismatch("int_type", "Input should be a valid integer")
        _within(value, lowest, highest)
        return value

    return check


def _within(value: float, lowest: float | None, highest: float | None) -> None:
    if lowest is not None and value < lowest:
        raise Mismatch("greater_than_equal", f"Input should be greater than or equal to {lowest}")
    if highest is not None and value > highest:
        raise Mismatch("less_than_equal", f"Input should be less than or equal to {highest}")


def one_of(*values: str) -> Check:
    """Return the check of a text that is one of `values`."""

    def check(value: Any) -> str:
        if value not in values:
            raise Mismatch("literal_error", f"Input should be {' or '.join(map(repr, values))}")
        return str(value)

    return check


def stop_words(value: Any) -> list[str]:
    """Accept one text or a list of texts; returns the list, without empty texts and repetitions."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise Mismatch("string_type", "Input should be a valid string, or a list of valid strings")
    found = [word for word in dict.fromkeys(words) if word]
    if len(found) > MAX_STOP_WORDS:
        raise Mismatch("too_long", f"List should have at most {MAX_STOP_WORDS} stop words, not {len(found)}")
    for word in found:
        if len(word) > MAX_STOP_LENGTH:
            raise Mismatch(
                "string_too_long", f"A stop word should have at most {MAX_STOP_LENGTH} characters, not {len(word)}"
            )
    return found

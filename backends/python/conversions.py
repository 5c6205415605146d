"""What Triton's binding, pybind11, makes of arguments that are not exactly of the type that a function declares.

Each function returns None for what pybind11 refuses.
"""

from __future__ import annotations

import operator


def as_text(value: object) -> str | None:
    """Return an argument of type `std::string` as a str: str, bytes (also of a NumPy array) and bytearray.

    C++ would keep bytes that are not UTF-8. Here each becomes U+FFFD, since names and texts of ours are str.
    """
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, such as NumPy's, just the text
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="replace")
    return None


def as_integer(value: object) -> int | None:
    """Return an integer argument as an int: int, bool, integers of NumPy, and whatever else has `__index__`."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]  # an object without it raises TypeError
    except TypeError:
        return None


def as_int64(value: object) -> int | None:
    """Return an argument of type `int64_t` as an int."""
    return _within(value, -(1 << 63), 1 << 63)


def as_uint32(value: object) -> int | None:
    """Return an argument of type `uint32_t` as an int."""
    return _within(value, 0, 1 << 32)


def as_uint64(value: object) -> int | None:
    """Return an argument of type `uint64_t` as an int."""
    return _within(value, 0, 1 << 64)


def _within(value: object, low: int, end: int) -> int | None:
    number = as_integer(value)
    return number if number is not None and low <= number < end else None


def as_texts(values: object) -> list[str] | None:
    """Return an argument of type `std::vector<std::string>` as a list: each sequence but str and bytes."""
    if not isinstance(values, (list, tuple)):
        return None
    texts: list[str] = []
    for value in values:
        text = as_text(value)
        if text is None:
            return None
        texts.append(text)
    return texts

"""How many parts a request may have. Both protocols refuse more, before they look at the parts. Pure."""

from __future__ import annotations

from typing import Any, TypeVar

from kernel.errors import InvalidArgument

_List = TypeVar("_List", bound=list[Any])

#: The most inputs, outputs, parameters, and dimensions of a shape. Triton has no limit, and the models that people
#: serve have tens.
MAX_PARTS = 512


def check_count(what: str, count: int) -> None:
    """Raise `InvalidArgument` if a request has too many of `what`."""
    if count > MAX_PARTS:
        raise InvalidArgument(f"the request has {count} {what}, expected at most {MAX_PARTS}")


def checked_list(what: str, parts: _List) -> _List:
    """Return `parts`. Raises `InvalidArgument` if they are too many."""
    check_count(what, len(parts))
    return parts

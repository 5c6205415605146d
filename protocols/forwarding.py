"""Which headers of a request become parameters for the model, and which may not. Pure.

Owns the meaning of --http-header-forward-pattern and --grpc-header-forward-pattern.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import BadOption, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.response import ParameterValue

#: Parameters with a meaning for the server: a header must not set them.
_RESERVED = frozenset(
    {
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "headers",
        "binary_data_output",
    }
)
_RESERVED_PREFIX = "triton_"


class Pattern(Protocol):
    """A compiled pattern of RE2, whose module has no types."""

    def search(self, text: str) -> object | None:
        """Return a match anywhere in `text`; None without one."""


class ReservedHeader(InvalidArgument):
    """A header with the name of a reserved parameter matches the pattern."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        self.name = name


class ForwardedHeaders(msgspec.Struct, frozen=True):
    """What the headers of one request head add to the parameters of requests with that head."""

    parameters: dict[str, str]
    #: The first header that matched and must not be forwarded; "" for none.
    reserved: str = ""

    def added_to(self, parameters: dict[str, ParameterValue]) -> dict[str, ParameterValue]:
        """Return `parameters` of a request with the parameters of the headers over them. Raises `ReservedHeader`."""
        if self.reserved:
            raise ReservedHeader(self.reserved)
        return {**parameters, **self.parameters}


def _compiled(pattern: str) -> Pattern:
    """Compile a pattern of RE2, as Triton does. It ignores case unless it begins with `(?-i)`.

    A search takes time in proportion to the name: with Python's `re` one long name can keep the event loop busy for
    hours. Raises `BadOption`.
    """
    import re2  # few servers forward headers

    options = re2.Options()
    options.case_sensitive = options.log_errors = False
    try:
        compiled: Pattern = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise BadOption(f"'{pattern}' is not a regular expression for headers to forward: {text}") from None
    return compiled


class HeaderForwarder:
    """Chooses headers by a regular expression."""

    def __init__(self, pattern: str) -> None:
        """`pattern` is searched in names of headers, as `_compiled` reads it. Raises `BadOption` if it is not one."""
        self._pattern = _compiled(pattern)

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return parameters named as the headers were sent; of a header that comes twice the last counts.

        Values are text that was decoded with `surrogateescape`. Bytes in them that are not UTF-8 become U+FFFD, because
        models get valid text only. Raises `ReservedHeader`.
        """
        found: dict[str, str] = {}
        for name, value in headers:
            if self._pattern.search(name) is None:
                continue
            if is_reserved(name.lower()):
                raise ReservedHeader(name)
            found[name] = value.encode(errors="surrogateescape").decode(errors="replace")
        return found

    def forward(self, headers: Iterable[tuple[str, str]]) -> ForwardedHeaders | None:
        """Return what becomes of `headers`, given as for `parameters`; None if no header matches."""
        try:
            parameters = self.parameters(headers)
        except ReservedHeader as error:
            return ForwardedHeaders({}, error.name)
        return ForwardedHeaders(parameters) if parameters else None


def is_reserved(name: str) -> bool:
    """Whether the parameter `name`, in lower case, has a meaning for the server."""
    return name in _RESERVED or name.startswith(_RESERVED_PREFIX)


def last_value(headers: Iterable[tuple[str | bytes, str | bytes]], name: str) -> str:
    """Return the value of the header `name`, given in lower case; of one that comes twice the last, "" without one.

    Names and values are bytes, or text that was decoded as Latin-1. Bytes that are not UTF-8 become surrogates.
    """
    found, length = b"", len(name)
    for given, value in headers:
        if len(given) != length:  # Latin-1 and lower case keep the length
            continue
        text = given if isinstance(given, str) else given.decode("latin-1")
        if text.lower() == name:
            found = value if isinstance(value, bytes) else value.encode("latin-1")
    return found.strip(b" \t").decode(errors="surrogateescape")


def make_forwarder(pattern: str) -> HeaderForwarder | None:
    """Return the forwarder for the value of the flag, None where nothing is forwarded. Raises `BadOption`."""
    return HeaderForwarder(pattern) if pattern else None

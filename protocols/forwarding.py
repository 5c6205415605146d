"""Which headers of a request become parameters for the model, and which may not. Pure.

Owns the meaning of --http-header-forward-pattern and --grpc-header-forward-pattern.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument
from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.request import ParameterValue

#: Parameters that mean something to the server itself: a header must not set them.
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


class ReservedHeader(InvalidArgument):
    """A header with the name of a reserved parameter matches the pattern."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        self.name = name


class ForwardedHeaders(msgspec.Struct, frozen=True):
    """What becomes of the headers of one request head, for any number of requests with that head."""

    parameters: dict[str, str]
    #: The first header that matched and must not be forwarded; "" for none.
    reserved: str = ""

    def added_to(self, parameters: dict[str, ParameterValue]) -> dict[str, ParameterValue]:
        """Return `parameters` of a request with those of the headers over them. Raises `ReservedHeader`."""
        if self.reserved:
            raise ReservedHeader(self.reserved)
        return {**parameters, **self.parameters}


class HeaderForwarder:
    """Chooses headers by a regular expression."""

    def __init__(self, pattern: str) -> None:
        """`pattern` is found in names of headers, in any case of letters. Raises `BadOption` if it is none."""
        try:
            self._pattern = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise BadOption(f"'{pattern}' is no regular expression for headers to forward: {error}") from None

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return parameters named as the headers were sent; of a header that comes twice the last counts.

        Values are text that was decoded with `surrogateescape`; what is no UTF-8 in them becomes U+FFFD, since no
        model could be sent it. Raises `ReservedHeader`.
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
        """Return what becomes of `headers`, given as for `parameters`; None where no header matches."""
        try:
            parameters = self.parameters(headers)
        except ReservedHeader as error:
            return ForwardedHeaders({}, error.name)
        return ForwardedHeaders(parameters) if parameters else None


def is_reserved(name: str) -> bool:
    """Whether the parameter `name`, in lower case, is the server's own."""
    return name in _RESERVED or name.startswith(_RESERVED_PREFIX)


def make_forwarder(pattern: str) -> HeaderForwarder | None:
    """Return the forwarder for the value of the flag, None where nothing is forwarded. Raises `BadOption`."""
    return HeaderForwarder(pattern) if pattern else None

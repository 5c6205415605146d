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

#: The flags with which a pattern of RE2 may begin: `(?i)`, `(?-i)`, `(?s-i)`.
_LEADING_FLAGS = re.compile(r"\(\?(?P<on>[ims]*)(?:-(?P<off>[ims]+))?\)")
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}
_NAMED_CLASS = re.compile(r"\[:\^?\w+:\]")

#: The parts of a pattern that matter here: an escape, a set of characters, and what only Python's `re` has.
_PARTS = re.compile(
    r"\\(?P<escape>.)"
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]"
    r"|(?P<group>\(\?(?:<?[=!]|#|>|\(|P=))"
    r"|(?<!\()(?P<possessive>[*+?}]\+)",
    re.DOTALL,
)
_NOT_IN_RE2 = {
    "(?=": "lookaheads", "(?!": "lookaheads", "(?<=": "lookbehinds", "(?<!": "lookbehinds", "(?#": "comments",
    "(?>": "atomic groups", "(?(": "conditions", "(?P=": "references to groups",
}  # fmt: skip


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
        """Return `parameters` of a request with those of the headers over them. Raises `ReservedHeader`."""
        if self.reserved:
            raise ReservedHeader(self.reserved)
        return {**parameters, **self.parameters}


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern in the syntax of RE2, which Triton uses. It ignores case unless it begins with `(?-i)`.

    RE2's syntax is a subset of that of Python's `re`, with two additions: flags can be removed, and classes can have
    names. What only Python has is refused, because Triton refuses it, and because it can make a search take long.
    Raises `re.error` for what cannot be translated.
    """
    flags = re.IGNORECASE
    if found := _LEADING_FLAGS.match(pattern):
        for name in found["on"]:
            flags |= _FLAGS[name]
        for name in found["off"] or "":
            flags &= ~_FLAGS[name]
        pattern = pattern[found.end() :]
    if found := _NAMED_CLASS.search(pattern):
        raise re.error(f"classes such as {found.group()} are not supported: list the characters, such as [a-z]")
    compiled = re.compile(pattern, flags)
    if unknown := _unknown_to_re2(pattern):
        raise re.error(f"{unknown} are not part of RE2's syntax")
    return compiled


def _unknown_to_re2(pattern: str) -> str:
    """Return what a pattern that Python can compile has and RE2 lacks, in the plural; "" for nothing."""
    for part in _PARTS.finditer(pattern):
        escape = part["escape"]
        if escape is not None:
            if escape in "123456789":
                return "references to groups"
            if escape == "Z":
                return "escapes such as \\Z"
        elif part["group"] is not None:
            return _NOT_IN_RE2[part["group"]]
        elif part["possessive"] is not None:
            return "possessive repetitions"
    return ""


class HeaderForwarder:
    """Chooses headers by a regular expression."""

    def __init__(self, pattern: str) -> None:
        """`pattern` is searched in names of headers, as `_compiled` reads it. Raises `BadOption` if it is not one."""
        try:
            self._pattern = _compiled(pattern)
        except re.error as error:
            raise BadOption(f"'{pattern}' is not a regular expression for headers to forward: {error}") from None

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
    found = b""
    for given, value in headers:
        text = given if isinstance(given, str) else given.decode("latin-1")
        if text.lower() == name:
            found = value if isinstance(value, bytes) else value.encode("latin-1")
    return found.strip(b" \t").decode(errors="surrogateescape")


def make_forwarder(pattern: str) -> HeaderForwarder | None:
    """Return the forwarder for the value of the flag, None where nothing is forwarded. Raises `BadOption`."""
    return HeaderForwarder(pattern) if pattern else None

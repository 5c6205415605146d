"""The JSON that Triton's protobuf reads beyond the standard, made standard JSON. Pure.

Configurations of load requests are read in Triton by protobuf's `JsonStringToMessage`. Beyond the standard it takes
keys without quotes, strings in single quotes, one comma behind the last member or element, numbers that end with a
point, any character behind a backslash, and all white space of C. It takes no comments. (Tried with Triton 2.51.)
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
      (?P<space> [ \t\n\v\f\r]++ )
    | (?P<double> "(?:[^"\\]|\\.)*+" )
    | (?P<single> '(?:[^'\\]|\\.)*+' )
    | (?P<word> [A-Za-z_$][A-Za-z0-9_$]*+ )
    | (?P<number> -?[0-9][0-9.eE+-]*+ )
    | (?P<open> ["'] )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)|(\")", re.DOTALL)

#: What the standard allows behind a backslash.
_ESCAPED = frozenset('"\\/bfnrtu')

#: Words that are values, and so no keys.
_VALUES = frozenset({"true", "false", "null"})


def standard_json(text: str) -> str:
    """Return `text` as standard JSON, if it is what Triton reads; anything else is returned so that no parser takes it.

    Takes time in proportion to the length.
    """
    tokens: list[tuple[str, str]] = []
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup
        assert kind is not None
        if kind == "open":  # a string without an end: nothing behind it can be read
            return text
        if kind != "space":
            tokens.append((kind, found.group()))
    parts: list[str] = []
    for place, (kind, token) in enumerate(tokens):
        before = tokens[place - 1][1] if place else ""
        after = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        parts.append(_standard(kind, token, before, after))
    return " ".join(parts)


def _standard(kind: str, token: str, before: str, after: str) -> str:
    """Return a token as the standard has it, by the tokens before and after it."""
    match kind:
        case "double":
            return f'"{_ESCAPE.sub(_escaped, token[1:-1])}"' if "\\" in token else token
        case "single":
            return f'"{_ESCAPE.sub(_escaped, token[1:-1])}"'
        case "word" if before in ("{", ",") and after == ":" and token not in _VALUES:
            return f'"{token}"'
        case "number" if token.endswith("."):
            return f"{token}0"
        case "other" if token == "," and after in ("}", "]") and before not in ("", ",", "[", "{", ":"):
            return ""
    return token


def _escaped(found: re.Match[str]) -> str:
    """Return what is behind a backslash as the standard has it, or a quote within single quotes."""
    if found[2]:
        return '\\"'
    return found[0] if found[1] in _ESCAPED else found[1]

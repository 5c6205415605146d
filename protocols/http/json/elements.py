"""Counts elements of large arrays and members of large objects in JSON, without making objects of them. Pure.

The text must be valid JSON.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shm.tensor import Buffer

_STRING = rb'"(?:[^"\\]++|\\.)*+"'

#: The end of a pattern for many parts, and how many: the memory for a match grows with them.
_MANY = rb"){0,4096}+"


def _container(depth: int) -> bytes:
    """Return a pattern of an array or object in which others are nested `depth` levels deep."""
    inner = rb"|" + _container(depth - 1) if depth else b""
    return rb"[\[{](?:[^\[\]{}\"]++|" + _STRING + inner + _MANY + rb"[\]}]"


#: Containers of usual depths are passed over in one match, which takes a hundredth of the time of single tokens.
_SHALLOW = _container(4)

#: What stands between the commas of the container that is counted, and between the brackets of those in it.
_OUTER = re.compile(rb"(?:[^\[\]{}\",]++|" + _STRING + rb"|" + _SHALLOW + _MANY, re.DOTALL)
_INNER = re.compile(rb"(?:[^\[\]{}\"]++|" + _STRING + rb"|" + _SHALLOW + _MANY, re.DOTALL)

#: Strings of an array without others in it, each with the comma before it, and what else may be in such an array.
_MANY_STRINGS = re.compile(rb"(?:[ \t\n\r,]*+" + _STRING + rb"){1,4096}+", re.DOTALL)
_ONE_STRING = re.compile(_STRING, re.DOTALL)
_SCALARS = re.compile(rb"[^\[\]{}\"]*+")
_SPACE = re.compile(rb"[ \t\n\r]*+")

_OPEN, _CLOSE, _COMMA = b"[{", b"]}", 0x2C


def count_parts(text: Buffer, limit: int) -> int:
    """Return how many elements or members the array or object `text` has, and `limit` + 1 for more than `limit`.

    1 for anything else.
    """
    if not len(text) or text[0] not in _OPEN:
        return 1
    space = _SPACE.match(text, 1)
    assert space is not None
    if text[space.end()] in _CLOSE:
        return 0
    return _count_flat(text, limit) or _count_nested(text, limit)


def _count_flat(text: Buffer, limit: int) -> int:
    """Return the number of elements of an array of scalars; 0 for anything else."""
    if text[0] != 0x5B:
        return 0
    count, position = 0, 1
    while (strings := _MANY_STRINGS.match(text, position)) is not None:
        octets = strings.group()
        count += octets.count(b'"') // 2 if b"\\" not in octets else len(_ONE_STRING.findall(octets))
        position = strings.end()
        if count > limit:
            return limit + 1
    rest = _SCALARS.match(text, position)
    if rest is None or rest.end() != len(text) - 1:
        return 0
    commas = memoryview(text)[position:-1].tobytes().count(b",")
    # Behind a string each comma begins an element, in an array of other scalars each but the first.
    return min(count + commas + (not count), limit + 1)


def _count_nested(text: Buffer, limit: int) -> int:
    count, depth, position, end = 1, 0, 1, len(text) - 1
    while position < end:
        found = (_INNER if depth else _OUTER).match(text, position)
        assert found is not None
        if found.end() > position:
            position = found.end()
            continue
        character = text[position]
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif not depth and character == _COMMA:
            count += 1
            if count > limit:
                break
        position += 1
    return count

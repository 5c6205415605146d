"""The segments of a recording: where the next records are written, and which segments are removed for them. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: A recording is removed by this part at a time, so that it has nearly the bytes that it may have.
_PARTS = 16

_MOST_SEGMENT_BYTE_SIZE = 64 << 20

_NAME = re.compile(r"([0-9]{8,})\.naiadrec")


class RingPosition(msgspec.Struct, array_like=True, frozen=True):
    """The segment that is written, and how many of its bytes are good. `byte_size` is 0 before its first record."""

    number: int
    byte_size: int = 0


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"{number:08}.naiadrec"


def segment_number(name: str) -> int | None:
    """Return the number of the segment with this file name; None for other files."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def first_position(names: Iterable[str]) -> RingPosition:
    """Return where a server begins in a folder with these files: behind all segments that are there."""
    return RingPosition(max(filter(None, map(segment_number, names)), default=0) + 1)


def segment_byte_size(limit: int) -> int:
    """Return the most bytes of a segment, in a recording of at most `limit` bytes. A single record may be larger."""
    return min(_MOST_SEGMENT_BYTE_SIZE, limit // _PARTS)


def part_for(position: RingPosition, sizes: Sequence[int], limit: int) -> int:
    """Return how many frames of these sizes go to the segment at `position`; the rest goes to later ones."""
    room = segment_byte_size(limit) - position.byte_size
    for count, size in enumerate(sizes):
        room -= size
        if room < 0 and (count or position.byte_size):
            return count
    return len(sizes)


def removed_for(segments: Iterable[tuple[int, int]], byte_size: int, limit: int, current: int) -> list[int] | None:
    """Return the numbers of the oldest segments that are removed before `byte_size` bytes are added to `current`.

    `segments` are numbers and sizes. None if the bytes do not fit although all others were removed.
    """
    found = sorted(segments)
    total = byte_size + sum(size for _, size in found)
    removed = []
    for number, size in found:
        if total <= limit:
            break
        if number != current:
            removed.append(number)
            total -= size
    return removed if total <= limit else None

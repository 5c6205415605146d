"""Mutations of octets, from a seed: the same each time. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

CORPORA = Path(__file__).parent / "corpora"

#: The longest input that is made.
MAX_BYTE_SIZE = 4096

#: What breaks parsers: lengths at the ends of their ranges, ends of texts, and marks of the formats.
TOKENS = [
    b"\0", b"\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\r\n", b"\r\n\r\n", b"{", b"}", b"[",
    b"]", b'"', b"\\", b"\\u0000", b"\\ud800", b"-", b"1e999", b"18446744073709551616", b"NaN",
    b"\xed\xa0\x80", b"\xc0\x80",
    b"null", b"true", b":", b",", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"\x0b", b"\x0c", b"\x2a\x7f", b"\x1e",
    b"Content-Length: 1\r\n", b"Transfer-Encoding: chunked\r\n", b"Inference-Header-Content-Length: 1\r\n",
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc1", b"input [",
    b"-9223372036854775809",
]  # fmt: skip


def corpus(target: str) -> list[bytes]:
    """Return the inputs that are kept for a target, crashes of earlier runs among them, in the order of their names."""
    return [path.read_bytes() for path in sorted((CORPORA / target).iterdir())]


def mutated(random: Random, seeds: Sequence[bytes]) -> bytes:
    """Return one input: one of `seeds` with a few changes, perhaps with a part of another one."""
    octets = bytearray(random.choice(seeds))
    for _ in range(random.choice([1, 1, 2, 3, 5, 8])):
        _change(random, octets, seeds)
    return bytes(octets[:MAX_BYTE_SIZE])


def _change(random: Random, octets: bytearray, seeds: Sequence[bytes]) -> None:
    place = random.randrange(len(octets) + 1)
    end = min(len(octets), place + random.choice([1, 1, 2, 4, 8, 32]))
    kind = random.randrange(7)
    if kind == 0 and octets:
        octets[place % len(octets)] ^= 1 << random.randrange(8)
    elif kind == 1:
        octets[place:end] = random.randbytes(random.randrange(1, 5))
    elif kind == 2:
        del octets[place:end]
    elif kind == 3:
        octets[place:place] = octets[place:end] * random.choice([1, 2, 20])
    elif kind == 4:
        octets[place:place] = random.choice(TOKENS)
    elif kind == 5:
        other = random.choice(seeds)
        start = random.randrange(len(other) + 1)
        octets[place:end] = other[start : start + random.choice([4, 16, 64, 256])]
    else:
        del octets[place:]


def inputs(random: Random, seeds: Sequence[bytes]) -> Iterator[bytes]:
    """Yield all seeds, and then mutations of them without an end."""
    yield from seeds
    while True:
        yield mutated(random, seeds)

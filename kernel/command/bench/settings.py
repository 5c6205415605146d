"""What the command line of `naiad bench` says: ranges of loads, percentiles, shapes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.options import BadOption

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The most loads of one run.
_MOST_LEVELS = 200

#: The most requests in flight.
MOST_CONNECTIONS = 16384

#: Connections of an open loop without `-c`.
OPEN_LOOP_CONNECTIONS = 256

#: Without -c and --rate.
DEFAULT_CONCURRENCY = "1:16"


class BenchLevel(msgspec.Struct, frozen=True):
    """One load: a closed loop with `connections` requests in flight, or an open loop with `rate` requests/s."""

    connections: int
    rate: float = 0.0


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A run of `naiad bench`."""

    model: str
    version: str
    url: str
    protocol: str
    levels: list[BenchLevel]
    distribution: str
    shared_memory: bool
    output_byte_size: int
    streaming: bool
    sequence_length: int
    input: str
    tensors: str
    shapes: dict[str, list[int]]
    batch: int
    headers: dict[str, str]
    duration_s: float
    warmup_s: float
    timeout_s: float
    percents: list[float]
    processes: int
    against: str
    as_csv: bool
    as_json: bool
    png: str


def levels_of(concurrency: str, rate: str) -> list[BenchLevel]:
    """Return the loads of `-c` and `--rate`. Raises `BadOption`."""
    if not rate:
        return [BenchLevel(int(each)) for each in span("--concurrency", concurrency or DEFAULT_CONCURRENCY, whole=True)]
    connections = span("--concurrency", concurrency, whole=True)[-1] if concurrency else OPEN_LOOP_CONNECTIONS
    return [BenchLevel(int(connections), each) for each in span("--rate", rate, whole=False)]


def span(flag: str, text: str, *, whole: bool) -> list[float]:
    """Return the numbers of N, A:B or A:B:STEP, or of several with commas.

    A:B doubles from A up to B, which is always the last. Raises `BadOption`.
    """
    found: list[float] = []
    for part in text.split(","):
        found += _span(flag, part.strip(), whole=whole)
    found = sorted(set(found))
    if len(found) > _MOST_LEVELS:
        raise BadOption(f"{flag} {text}: these are {len(found)} loads; the most are {_MOST_LEVELS}")
    if whole and found[-1] > MOST_CONNECTIONS:
        raise BadOption(f"{flag} {text}: the most are {MOST_CONNECTIONS}")
    return found


def _span(flag: str, text: str, *, whole: bool) -> list[float]:
    parts = text.split(":")
    try:
        numbers = [float(int(part)) if whole else float(part) for part in parts]
    except ValueError:
        numbers = []
    usable = len(numbers) in (1, 2, 3) and all(0 < number < 1e9 for number in numbers)
    if not usable or (len(numbers) > 1 and numbers[0] > numbers[1]):
        raise BadOption(f"{flag} takes N, FIRST:LAST (doubled each time) or FIRST:LAST:STEP, and not '{text}'")
    if len(numbers) == 1:
        return numbers
    first, last = numbers[:2]
    if len(numbers) == 2:
        found = []
        while first < last:
            found.append(first)
            first *= 2
        return [*found, last]
    step = numbers[2]
    count = int((last - first) / step + 1e-9)
    if count > _MOST_LEVELS:
        raise BadOption(f"{flag} {text}: these are {count + 1} loads; the most are {_MOST_LEVELS}")
    return [first + number * step for number in range(count + 1)]


def percents_of(text: str) -> list[float]:
    """Return the percentiles of `50,90,99`. Raises `BadOption`."""
    try:
        found = sorted({float(part.strip().removeprefix("p")) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < each <= 100 for each in found):
        raise BadOption(f"--percentiles takes numbers above 0 and up to 100, as 50,90,99, and not '{text}'")
    return found


def shapes_of(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return input name → its shape of `NAME:2,3`. Raises `BadOption`."""
    found = {}
    for text in texts:
        name, _, dims = text.rpartition(":")
        try:
            shape = [int(part) for part in dims.split(",")]
        except ValueError:
            shape = []
        if not name or not shape or min(shape) < 0:
            raise BadOption(f"--shape takes NAME:DIM,DIM,..., and not '{text}'")
        found[name] = shape
    return found


def headers_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the headers of `Name: value`. Raises `BadOption`."""
    found = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip() or set("\r\n") & set(text):
            raise BadOption(f"--header takes 'NAME: VALUE', and not '{text}'")
        found[name.strip()] = value.strip()
    return found

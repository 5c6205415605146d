"""What the command and its load processes send one another, and how it is framed. Pure.

`LatencyHistogram`: latencies counted in buckets that are less than 1 % wide. Pure.

A run of any length takes the same memory, and the counts of several processes can be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes before each message: its length, little-endian.
LENGTH_BYTE_SIZE = 8


class LoadSetup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a load process: where requests go, and the requests themselves."""

    #: The module with the state of a connection, by its name: no package may import one above it.
    protocol_module: str
    host: str
    port: int
    #: The block of headers of gRPC's calls.
    head: bytes
    streaming: bool
    #: A request of a stream ends with a response that says so.
    has_final: bool
    #: For each connection of the process, or one entry for all of them: requests that are sent in turn. A request is
    #: one part, or two with the id of its sequence between them. With sequences, four in a row are one request:
    #: neither START nor END, START, END, both.
    requests: list[list[list[bytes]]]
    #: Requests of a sequence; 0 without sequences.
    sequence_length: int
    #: The id of the first sequence of this process.
    first_sequence: int
    #: Seconds until a request without its response has failed.
    timeout_s: float


class LoadPoint(msgspec.Struct, frozen=True, tag=True):
    """A load for a load process. Times are nanoseconds of CLOCK_MONOTONIC."""

    connections: int
    start_ns: int
    #: What ends from here on counts (in an open loop: what is due from here on), and until `end_ns`.
    measure_ns: int
    end_ns: int
    #: Requests per second; 0 for a closed loop.
    rate: float = 0.0
    phase: float = 0.0
    distribution: str = "constant"
    seed: int = 0


class StopLoad(msgspec.Struct, frozen=True, tag=True):
    """End the load now; what was measured so far is sent."""


class LoadReady(msgspec.Struct, frozen=True, tag=True):
    """From a load process, once: it has its setup, and begins a load when it is due."""


class PointProgress(msgspec.Struct, frozen=True, tag=True):
    """From a load process, some times a second: what has ended within the time that counts."""

    completed: int
    failed: int


class Latencies(msgspec.Struct, frozen=True):
    """A `LatencyHistogram` on its way."""

    counts: dict[int, int]
    total: int
    largest: int


class PointResult(msgspec.Struct, frozen=True, tag=True):
    """From a load process: what it has measured."""

    latencies: Latencies
    #: Until the first response of a request, and the mean time between two responses of one; for streams only.
    first_responses: Latencies
    response_gaps: Latencies
    #: How late requests of an open loop were sent though a connection was free: the client's own delay.
    lateness: Latencies
    #: Successes and responses within the time that counts.
    completed: int
    responses: int
    #: Completed in each second of it.
    by_second: list[int]
    #: Text of an error → how often.
    errors: dict[str, int]
    #: Requests of an open loop that were due and not sent, because all connections were busy.
    unsent: int
    #: The most that waited for a connection at once.
    most_waiting: int
    #: The time that counts, and the processor time of the process in it.
    measured_ns: int
    cpu_ns: int


class LoadProblem(msgspec.Struct, frozen=True, tag=True):
    """From a load process: it cannot go on."""

    text: str


ToProcess = LoadSetup | LoadPoint | StopLoad

FromProcess = LoadReady | PointProgress | PointResult | LoadProblem

to_process: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)

from_process: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)

_encoder = msgspec.msgpack.Encoder()


def framed(message: Any) -> bytes:
    """Return a message with its length before it."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTE_SIZE, "little") + body


class MessageFrames:
    """Puts messages together from what a pipe gives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; return the messages that are complete now."""
        self._buffer += data
        found = []
        while len(self._buffer) >= LENGTH_BYTE_SIZE:
            end = LENGTH_BYTE_SIZE + int.from_bytes(self._buffer[:LENGTH_BYTE_SIZE], "little")
            if len(self._buffer) < end:
                break
            found.append(bytes(self._buffer[LENGTH_BYTE_SIZE:end]))
            del self._buffer[:end]
        return found


#: Values below 2 ** this are counted exactly; above, each power of two has half as many buckets.
_BITS = 8

_HALF = 1 << (_BITS - 1)

#: Buckets for values of up to 2 ** 48 nanoseconds, which are three days.
_MAX_VALUE = (1 << 48) - 1

_BUCKETS = (48 - _BITS + 2) * _HALF


class LatencyHistogram:
    """Counts of values in nanoseconds."""

    __slots__ = ("_counts", "count", "largest", "total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.count = 0
        #: Sum of all values.
        self.total = 0
        self.largest = 0

    def record(self, value: int) -> None:
        """Count a value. Negative ones count as 0."""
        if value < 0:
            value = 0
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value
        if value > _MAX_VALUE:
            value = _MAX_VALUE
        shift = value.bit_length() - _BITS
        self._counts[value if shift <= 0 else shift * _HALF + (value >> shift)] += 1

    @property
    def mean(self) -> float:
        """The mean of the values themselves, not of their buckets; 0 without values."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Return a value that `percent` of the values do not exceed, with an error below 1 %; 0 without values."""
        if not self.count:
            return 0.0
        rank = max(1, min(self.count, -(-self.count * percent // 100)))
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                return min(_middle(index), float(self.largest))
        raise AssertionError

    def as_map(self) -> dict[int, int]:
        """Return index of a bucket → its count, without empty buckets."""
        return {index: count for index, count in enumerate(self._counts) if count}

    def add(self, counts: Mapping[int, int], total: int, largest: int) -> None:
        """Add what `as_map`, `total` and `largest` of another histogram are."""
        for index, count in counts.items():
            self._counts[index] += count
            self.count += count
        self.total += total
        self.largest = max(self.largest, largest)


def _middle(index: int) -> float:
    """Return the middle of a bucket."""
    if index < 2 * _HALF:
        return float(index)
    shift = index // _HALF - 1
    low = (index - shift * _HALF) << shift
    return low + ((1 << shift) - 1) / 2

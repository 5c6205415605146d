"""How often a connection may send frames that are cheap for the client but cost the server work. Pure: callers pass in
the time.

A client that does more gets ENHANCE_YOUR_CALM and loses its connection; other connections do not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode
from protocols.grpc.h2.keepalive import PingStrikes

if TYPE_CHECKING:
    from protocols.grpc.h2.keepalive import KeepaliveRules

#: Calls at the same time on one connection. One channel of a Triton client carries all of its calls.
MAX_CONCURRENT_STREAMS = 1024

#: As many are opened on each connection also when all memory is in use: clients that ask for health.
ALWAYS_OPENED_STREAMS = 8

#: Large frames save work with large tensors: echoing 16 MiB takes 21 ms of this process's time with frames of
#: 1 MiB, and 29 ms with those of 16 KiB, HTTP/2's own limit (two cores, grpcio as the client). In frames of 2 MiB
#: a tensor of 1 MiB arrives and leaves together with the few bytes of message around it: no frame, read, write and
#: event-loop iteration for these alone, about a twentieth of such a request. Large frames cost no memory: the payload
#: of DATA is passed on as it arrives, never gathered. Frames of other types have limits of their own.
MAX_FRAME_BYTE_SIZE = 2**21

#: The headers of a request, as bytes on the wire and as the list that they stand for.
MAX_HEADER_BLOCK_BYTE_SIZE = 16 * 2**10
MAX_HEADER_LIST_BYTE_SIZE = 16 * 2**10
MAX_CONTINUATION_FRAMES = 8

MAX_SETTINGS_ENTRIES = 32

#: Flow-control windows: a tensor of 16 MiB arrives without a pause, and several of them on one connection.
CONNECTION_WINDOW_BYTE_SIZE = 64 * 2**20
STREAM_WINDOW_BYTE_SIZE = 32 * 2**20

#: DATA frames in a row that carry nothing and end nothing.
MAX_EMPTY_DATA_FRAMES = 100

#: Frames of one connection that are handled of one read, before those of other connections. Where many connections
#: have many frames, it is the least number: a call of a usual client is one of them, or HEADERS and DATA are two.
FRAMES_PER_READ = 64
LEAST_FRAMES_PER_READ = 2

#: How long the preface or a header block may take, and how long output may make no progress.
HANDSHAKE_TIMEOUT_S = 10
PROGRESS_TIMEOUT_S = 60


class TokenBucket:
    """Allows `burst` events at once, and `per_second` in the long run."""

    __slots__ = ("_burst", "_left", "_per_ns", "_seen_ns")

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = float(burst)
        self._left = self._burst
        self._per_ns = per_second / 1e9
        self._seen_ns: int | None = None

    def take(self, now_ns: int) -> bool:
        """Count one event; returns whether it is allowed."""
        if self._seen_ns is not None:
            self._left = min(self._burst, self._left + (now_ns - self._seen_ns) * self._per_ns)
        self._seen_ns = now_ns
        self._left -= 1
        return self._left >= 0


class FloodCounters:
    """Counts these frames of one connection; a method raises `ConnectionFailure` when the limit is exceeded."""

    def __init__(self, rules: KeepaliveRules | None = None) -> None:
        """Without `rules` only the number of pings a second is limited."""
        #: The time of what is counted; `ReceivingHalf.receive` sets it.
        self.now_ns = 0
        self._resets = TokenBucket(1000, 33)
        self._settings = TokenBucket(100, 10)
        self._pings = TokenBucket(100, 100)
        self._strikes = None if rules is None else PingStrikes(rules)
        self._useless_frames = TokenBucket(1000, 100)
        self._empty_data = 0

    def stream_reset(self) -> None:
        """A stream ended before its response: by the client's RST_STREAM, or by ours for a mistake of the client."""
        if not self._resets.take(self.now_ns):
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "too many streams reset")

    def settings(self) -> None:
        """SETTINGS, no acknowledgement."""
        if not self._settings.take(self.now_ns):
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "too many SETTINGS")

    def ping(self, *, has_calls: bool, sent_byte_size: int) -> None:
        """A ping, no acknowledgement; the arguments are those of `PingStrikes.is_excessive`."""
        strikes = self._strikes
        if not self._pings.take(self.now_ns) or (
            strikes is not None
            and strikes.is_excessive(self.now_ns, has_calls=has_calls, sent_byte_size=sent_byte_size)
        ):
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")

    def useless_frame(self) -> None:
        """A frame that changes nothing: PRIORITY, or one of an unknown type."""
        if not self._useless_frames.take(self.now_ns):
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "too many frames without a use")

    def data(self, content_byte_size: int) -> None:
        """A DATA frame that does not end its stream; padding does not count as content."""
        if content_byte_size:
            self._empty_data = 0
            return
        self._empty_data += 1
        if self._empty_data > MAX_EMPTY_DATA_FRAMES:
            raise ConnectionFailure(H2ErrorCode.ENHANCE_YOUR_CALM, "too many empty DATA frames")

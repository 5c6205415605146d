"""What a connection may do, and for how long: pings, its age, frames that are cheap for the client only. Pure.

`Lifetime` says when the server pings a connection and when the connection is too old, `PingStrikes` how many pings the
peer may send. Their rules are gRPC core's (chttp2: keepalive, ping_rate_policy.cc, ping_abuse_policy.cc,
max_age_filter). `FloodCounters` limit how often a connection may send frames that cost the server work: a client that
does more gets ENHANCE_YOUR_CALM and loses its connection; other connections do not wait. Callers pass in times and
random numbers.
"""

from __future__ import annotations

import enum

import msgspec

from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode

#: Calls at the same time on one connection. One channel of a Triton client carries all of its calls.
MAX_CONCURRENT_STREAMS = 1024

#: As many are opened on each connection also when all memory is in use: clients that ask for health.
ALWAYS_OPENED_STREAMS = 8

#: Large frames save work with large tensors: echoing 16 MiB takes 21 ms of this process's time with frames of
#: 1 MiB, and 29 ms with frames of 16 KiB, HTTP/2's own limit (two cores, grpcio as the client). In frames of 2 MiB
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

#: Frames of one connection that are handled of one read, before other connections' frames. Where many connections
#: have many frames, it is the least number: a call of a usual client is one of them, or HEADERS and DATA are two.
FRAMES_PER_READ = 64

LEAST_FRAMES_PER_READ = 2

#: How long the preface or a header block may take, and how long output may make no progress.
HANDSHAKE_TIMEOUT_S = 10

PROGRESS_TIMEOUT_S = 60

#: How often a peer without calls may ping where that is not permitted (RFC 1122's interval of TCP keep-alive).
_IDLE_PING_INTERVAL_NS = 2 * 3600 * 10**9

#: Maximum ages differ by up to this share, so that connections that began together do not end together.
MAX_AGE_JITTER = 0.1


class KeepaliveRules(msgspec.Struct, frozen=True):
    """The operator's options for connections. Times are in nanoseconds."""

    #: A peer that has sent nothing for this long is pinged.
    time_ns: int
    #: If it sends nothing for this long after the ping, the connection is closed.
    timeout_ns: int
    #: Whether connections without a call are pinged, and may ping.
    permit_without_calls: bool
    #: How many pings the server sends without sending headers or data between them; 0 for no limit.
    max_pings_without_data: int
    #: The shortest time between two pings of a peer while the server sends neither headers nor data.
    min_recv_ping_interval_ns: int
    #: How often a peer may ping sooner than that; 0 for no limit.
    max_ping_strikes: int
    #: None for no maximum age.
    max_age_ns: int | None
    #: How long calls may continue when their connection gets too old; None for as long as they need.
    max_age_grace_ns: int | None


class PingStrikes:
    """Counts the pings of the peer that arrived too soon."""

    def __init__(self, rules: KeepaliveRules) -> None:
        self._rules = rules
        #: None since the server last sent headers or data: the next ping is never too soon.
        self._last_ns: int | None = None
        self._strikes = 0
        self._sent_byte_size = 0

    def is_excessive(self, now_ns: int, *, has_calls: bool, sent_byte_size: int) -> bool:
        """Count a ping; returns whether it is one too many.

        `has_calls` says whether any call runs, `sent_byte_size` how much the server has sent so far, without pings
        and acknowledgements.
        """
        if sent_byte_size > self._sent_byte_size:
            self._sent_byte_size = sent_byte_size
            self._last_ns = None
            self._strikes = 0
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is None:
            return False
        idle = not has_calls and not self._rules.permit_without_calls
        interval_ns = _IDLE_PING_INTERVAL_NS if idle else self._rules.min_recv_ping_interval_ns
        if now_ns - last_ns >= interval_ns:
            return False
        self._strikes += 1
        return 0 < self._rules.max_ping_strikes < self._strikes


class LifetimeAction(enum.Enum):
    """What is to be done with a connection now."""

    NOTHING = enum.auto()
    PING = enum.auto()
    #: Accept no more calls, and close when those that run have ended.
    DRAIN = enum.auto()
    #: Close at once: the peer is gone, or its calls have taken too long.
    CLOSE = enum.auto()


class Lifetime:
    """Decides when one connection is pinged and when it ends. `next_action` is called at `due_ns`, and not before."""

    def __init__(self, rules: KeepaliveRules, opened_ns: int, jitter: float) -> None:
        """`jitter` is a random number from -1 to 1."""
        self._rules = rules
        #: When the peer will have been silent for too long, as far as is known.
        self._silent_ns = opened_ns + rules.time_ns
        #: When the ping was sent that the peer has not acknowledged.
        self._pinged_ns: int | None = None
        self._pings_left = rules.max_pings_without_data
        self._sent_byte_size = 0
        #: When the connection is too old; after that, when its calls have taken too long.
        self._old_ns: int | None = None
        self._draining = False
        if rules.max_age_ns is not None:
            self._old_ns = opened_ns + round(rules.max_age_ns * (1 + MAX_AGE_JITTER * jitter))

    @property
    def due_ns(self) -> int:
        """When to call `next_action` again."""
        silent_ns = self._silent_ns if self._pinged_ns is None else self._pinged_ns + self._rules.timeout_ns
        return silent_ns if self._old_ns is None else min(silent_ns, self._old_ns)

    def next_action(
        self, now_ns: int, *, last_received_ns: int, has_calls: bool, sent_byte_size: int
    ) -> LifetimeAction:
        """Return what is to be done.

        `last_received_ns` is when the last byte arrived, `sent_byte_size` how much was sent so far, without pings.
        """
        if self._old_ns is not None and now_ns >= self._old_ns:
            if self._draining:
                return LifetimeAction.CLOSE
            self._draining = True
            grace_ns = self._rules.max_age_grace_ns
            self._old_ns = None if grace_ns is None else now_ns + grace_ns
            return LifetimeAction.DRAIN
        if sent_byte_size > self._sent_byte_size:
            self._sent_byte_size = sent_byte_size
            self._pings_left = self._rules.max_pings_without_data
        if self._pinged_ns is not None:
            return self._wait_for_acknowledgement(now_ns, last_received_ns, self._pinged_ns)
        self._silent_ns = last_received_ns + self._rules.time_ns
        if now_ns < self._silent_ns:
            return LifetimeAction.NOTHING
        return self._ping(now_ns, has_calls=has_calls)

    def _wait_for_acknowledgement(self, now_ns: int, last_received_ns: int, pinged_ns: int) -> LifetimeAction:
        if last_received_ns > pinged_ns:  # whatever it was, the peer lives
            self._pinged_ns = None
            self._silent_ns = last_received_ns + self._rules.time_ns
            return LifetimeAction.NOTHING
        return LifetimeAction.CLOSE if now_ns >= pinged_ns + self._rules.timeout_ns else LifetimeAction.NOTHING

    def _ping(self, now_ns: int, *, has_calls: bool) -> LifetimeAction:
        self._silent_ns = now_ns + self._rules.time_ns
        if not has_calls and not self._rules.permit_without_calls:
            return LifetimeAction.NOTHING
        if self._rules.max_pings_without_data:
            if not self._pings_left:
                return LifetimeAction.NOTHING
            self._pings_left -= 1
        self._pinged_ns = now_ns
        return LifetimeAction.PING


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
        """A ping, no acknowledgement; the arguments are as in `PingStrikes.is_excessive`."""
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

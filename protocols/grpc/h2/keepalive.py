"""When a connection is asked for a sign of life, which of the peer's pings are too many, and when it is too old.

The rules are those of gRPC core (chttp2: keepalive, ping_rate_policy.cc, ping_abuse_policy.cc, max_age_filter).
Pure: times are handed in, and random numbers, too.
"""

from __future__ import annotations

import enum

import msgspec

#: How often a peer without calls may ping that is not allowed to (RFC 1122's interval of TCP keep-alive).
_IDLE_PING_INTERVAL_NS = 2 * 3600 * 10**9

#: Ages differ by up to this part, so that connections that began together do not end together.
MAX_AGE_JITTER = 0.1


class KeepaliveRules(msgspec.Struct, frozen=True):
    """What the server was told about connections. Times are in nanoseconds."""

    #: Without a byte from the peer for this long, it is pinged.
    time_ns: int
    #: Without a byte after the ping for this long, the connection is closed.
    timeout_ns: int
    #: Whether connections without a call are pinged, and may ping.
    permit_without_calls: bool
    #: Pings that the server sends before it must have sent headers or data; 0 for no limit.
    max_pings_without_data: int
    #: How often a peer may ping between two answers.
    min_recv_ping_interval_ns: int
    #: How often it may ping sooner than that; 0 for always.
    max_ping_strikes: int
    #: None for no end.
    max_age_ns: int | None
    #: How long calls may take that run when a connection gets too old; None for as long as they need.
    max_age_grace_ns: int | None


class PingStrikes:
    """Counts the pings of the peer that came too soon."""

    def __init__(self, rules: KeepaliveRules) -> None:
        self._rules = rules
        #: None since the server last sent headers or data: the next ping is never too soon.
        self._last_ns: int | None = None
        self._strikes = 0
        self._sent_byte_size = 0

    def too_many(self, now_ns: int, *, calls: bool, sent_byte_size: int) -> bool:
        """Count a ping; returns whether it is one too many.

        `calls` says whether any call runs, `sent_byte_size` how much the server has sent so far, but for pings and
        acknowledgements.
        """
        if sent_byte_size > self._sent_byte_size:
            self._sent_byte_size = sent_byte_size
            self._last_ns = None
            self._strikes = 0
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is None:
            return False
        idle = not calls and not self._rules.permit_without_calls
        interval_ns = _IDLE_PING_INTERVAL_NS if idle else self._rules.min_recv_ping_interval_ns
        if now_ns - last_ns >= interval_ns:
            return False
        self._strikes += 1
        return 0 < self._rules.max_ping_strikes < self._strikes


class Wanted(enum.Enum):
    """What is to be done with a connection now."""

    NOTHING = enum.auto()
    PING = enum.auto()
    #: Let it end: it takes no more calls, and closes behind those that run.
    DRAIN = enum.auto()
    #: Cut it: the peer is gone, or its calls have taken too long.
    CLOSE = enum.auto()


class Lifetime:
    """Decides when one connection is pinged and when it ends. Asked again at `due_ns`, and not before."""

    def __init__(self, rules: KeepaliveRules, opened_ns: int, jitter: float) -> None:
        """`jitter` is a random number from -1 to 1."""
        self._rules = rules
        #: When the peer will have been silent for too long, as far as was seen.
        self._silent_ns = opened_ns + rules.time_ns
        #: When the ping was sent that the peer has not answered.
        self._pinged_ns: int | None = None
        self._pings_left = rules.max_pings_without_data
        self._sent_byte_size = 0
        #: When the connection is too old, and behind that, when its calls are.
        self._old_ns: int | None = None
        self._draining = False
        if rules.max_age_ns is not None:
            self._old_ns = opened_ns + round(rules.max_age_ns * (1 + MAX_AGE_JITTER * jitter))

    @property
    def due_ns(self) -> int:
        """When to look again."""
        silent_ns = self._silent_ns if self._pinged_ns is None else self._pinged_ns + self._rules.timeout_ns
        return silent_ns if self._old_ns is None else min(silent_ns, self._old_ns)

    def look(self, now_ns: int, *, received_ns: int, calls: bool, sent_byte_size: int) -> Wanted:
        """Return what is to be done.

        `received_ns` is when the last byte came, `sent_byte_size` how much was sent but for pings.
        """
        if self._old_ns is not None and now_ns >= self._old_ns:
            if self._draining:
                return Wanted.CLOSE
            self._draining = True
            grace_ns = self._rules.max_age_grace_ns
            self._old_ns = None if grace_ns is None else now_ns + grace_ns
            return Wanted.DRAIN
        if sent_byte_size > self._sent_byte_size:
            self._sent_byte_size = sent_byte_size
            self._pings_left = self._rules.max_pings_without_data
        if self._pinged_ns is not None:
            return self._wait_for_answer(now_ns, received_ns, self._pinged_ns)
        self._silent_ns = received_ns + self._rules.time_ns
        if now_ns < self._silent_ns:
            return Wanted.NOTHING
        return self._ping(now_ns, calls=calls)

    def _wait_for_answer(self, now_ns: int, received_ns: int, pinged_ns: int) -> Wanted:
        if received_ns > pinged_ns:  # whatever it was, the peer lives
            self._pinged_ns = None
            self._silent_ns = received_ns + self._rules.time_ns
            return Wanted.NOTHING
        return Wanted.CLOSE if now_ns >= pinged_ns + self._rules.timeout_ns else Wanted.NOTHING

    def _ping(self, now_ns: int, *, calls: bool) -> Wanted:
        self._silent_ns = now_ns + self._rules.time_ns
        if not calls and not self._rules.permit_without_calls:
            return Wanted.NOTHING
        if self._rules.max_pings_without_data:
            if not self._pings_left:
                return Wanted.NOTHING
            self._pings_left -= 1
        self._pinged_ns = now_ns
        return Wanted.PING

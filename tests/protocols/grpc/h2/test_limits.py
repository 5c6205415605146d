"""How often a connection may do what costs the server work; its pings and its age, at times that the tests choose."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode, Setting
from protocols.grpc.h2.headers import encode_block, status_trailers
from protocols.grpc.h2.limits import FloodCounters, KeepaliveRules, Lifetime, LifetimeAction, PingStrikes, TokenBucket
from tests.protocols.grpc.h2.client_frames import FIELDS, failure, feed, frame, open_connection, request_headers

SECOND = 10**9

BLOCK = encode_block(FIELDS)


def test_a_bucket_allows_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(burst=3, per_second=2)
    assert [bucket.take(0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(SECOND) for _ in range(2)] == [True, False]


def test_a_bucket_never_holds_more_than_its_burst() -> None:
    bucket = TokenBucket(burst=2, per_second=10)
    assert bucket.take(0)
    assert [bucket.take(100 * SECOND) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("count", "allowed"),
    [
        (FloodCounters.stream_reset, 1000),
        (FloodCounters.settings, 100),
        (lambda floods: floods.ping(has_calls=True, sent_byte_size=0), 100),
        (FloodCounters.useless_frame, 1000),
        (lambda floods: floods.data(0), limits.MAX_EMPTY_DATA_FRAMES),
    ],
)
def test_one_more_than_is_allowed_ends_the_connection(count: Callable[[FloodCounters], None], allowed: int) -> None:
    floods = FloodCounters()
    for _ in range(allowed):
        count(floods)
    with pytest.raises(ConnectionFailure) as caught:
        count(floods)
    assert caught.value.code is H2ErrorCode.ENHANCE_YOUR_CALM


def test_the_time_of_the_counters_is_the_one_that_was_set() -> None:
    floods = FloodCounters()
    for second in range(10):
        floods.now_ns = second * SECOND
        for _ in range(90):
            floods.ping(has_calls=False, sent_byte_size=0)


def test_data_with_content_forgives_empty_frames() -> None:
    floods = FloodCounters()
    for _ in range(10):
        for _ in range(limits.MAX_EMPTY_DATA_FRAMES):
            floods.data(0)
        floods.data(1)


# ---- floods of frames -----------------------------------------------------------------------


def rapid_resets(count: int) -> bytes:
    return b"".join(request_headers(2 * n + 1) + frames.rst_stream(2 * n + 1, H2ErrorCode.CANCEL) for n in range(count))


@pytest.mark.parametrize(
    ("flood", "allowed"),
    [
        (rapid_resets, 1000),
        (lambda count: b"".join(request_headers(2 * n + 1, [("a", "b")]) for n in range(count)), 1000),
        (lambda count: frames.settings([]) * count, 99),
        (lambda count: frame(frames.PING, 0, 0, bytes(8)) * count, 100),
        (lambda count: frame(frames.PRIORITY, 0, 1, bytes(5)) * count, 1000),
        (lambda count: frame(0x42, 0, 1, b"unknown") * count, 1000),
        (lambda count: request_headers(1) + frame(frames.DATA, 0, 1) * count, 100),
        (lambda count: frame(frames.HEADERS, 0, 1, BLOCK) + frame(frames.CONTINUATION, 0, 1) * count, 8),
    ],
)
def test_a_flood_ends_the_connection(flood: Callable[[int], bytes], allowed: int) -> None:
    connection = open_connection()
    feed(connection, flood(allowed))
    assert not connection.sending.ended
    connection = open_connection()
    feed(connection, flood(allowed + 1))
    assert failure(connection) is H2ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "octets",
    [
        frames.settings([(Setting.HEADER_TABLE_SIZE, 1)] * (limits.MAX_SETTINGS_ENTRIES + 1)),
        frames.frame_header(limits.MAX_HEADER_BLOCK_BYTE_SIZE * 2, frames.HEADERS, 4, 1),
        frame(frames.HEADERS, 0, 1, bytes(16_000)) + frame(frames.CONTINUATION, 0, 1, bytes(16_000)),
        # One entry of 4 KiB in the table, and many references to it.
        frame(frames.HEADERS, 4, 1, b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 1000),
    ],
)
def test_headers_and_settings_without_a_bound_end_the_connection(octets: bytes) -> None:
    connection = open_connection()
    feed(connection, octets)
    assert failure(connection) is H2ErrorCode.ENHANCE_YOUR_CALM


def test_pings_at_a_calm_pace_go_on_for_ever() -> None:
    connection = open_connection()
    for second in range(1000):
        feed(connection, frame(frames.PING, 0, 0, bytes(8)) * 50, second * SECOND)
    assert not connection.sending.ended


HOUR = 3600 * SECOND

RULES = KeepaliveRules(
    time_ns=100 * SECOND,
    timeout_ns=20 * SECOND,
    permit_without_calls=False,
    max_pings_without_data=2,
    min_recv_ping_interval_ns=300 * SECOND,
    max_ping_strikes=2,
    max_age_ns=None,
    max_age_grace_ns=None,
)


def rules(**changes: Any) -> KeepaliveRules:
    return msgspec.structs.replace(RULES, **changes)


def strikes(times_s: list[int], rules: KeepaliveRules, *, calls: bool, sent: list[int] | None = None) -> list[bool]:
    """Return for pings at `times_s` whether each was one too many; `sent` is what the server had sent by then."""
    counter = PingStrikes(rules)
    sent = sent or [0] * len(times_s)
    return [
        counter.is_excessive(time_s * SECOND, has_calls=calls, sent_byte_size=size)
        for time_s, size in zip(times_s, sent, strict=True)
    ]


# ---- pings of the peer ----------------------------------------------------------------------


def test_the_first_ping_is_free_and_two_that_come_too_soon_are_forgiven() -> None:
    assert strikes([0, 1, 2, 3], RULES, calls=True) == [False, False, False, True]


def test_pings_that_keep_to_the_interval_are_never_too_many() -> None:
    assert strikes([0, 300, 600, 900, 1200], RULES, calls=True) == [False] * 5


def test_without_calls_the_interval_is_two_hours() -> None:
    assert strikes([0, 300, 600, 900], RULES, calls=False) == [False, False, False, True]
    assert strikes([0, 7200, 14400, 21600], RULES, calls=False) == [False] * 4


def test_where_pings_without_calls_are_permitted_the_interval_is_that_of_calls() -> None:
    assert strikes([0, 300, 600, 900], rules(permit_without_calls=True), calls=False) == [False] * 4


def test_a_response_between_two_pings_forgives_all() -> None:
    assert strikes([0, 1, 2, 3, 4, 5, 6], RULES, calls=True, sent=[0, 0, 0, 100, 100, 100, 100]) == [False] * 6 + [True]


def test_a_limit_of_no_strikes_forgives_always() -> None:
    assert strikes(list(range(50)), rules(max_ping_strikes=0), calls=True) == [False] * 50


# ---- pings of the server --------------------------------------------------------------------


class Connection:
    """A connection as `Lifetime` sees it. What happened to it is in `seen`."""

    def __init__(self, rules: KeepaliveRules, *, calls: bool = True, jitter: float = 0.0) -> None:
        self.lifetime = Lifetime(rules, 0, jitter)
        self.calls = calls
        self.received_ns = 0
        self.sent_byte_size = 0
        self.seen: list[tuple[float, LifetimeAction]] = []

    def run(self, until_s: float) -> list[tuple[float, LifetimeAction]]:
        """Ask for the next action whenever it is due, up to a time; returns the actions with their times in seconds."""
        while (now_ns := self.lifetime.due_ns) <= until_s * SECOND:
            action = self.lifetime.next_action(
                now_ns, last_received_ns=self.received_ns, has_calls=self.calls, sent_byte_size=self.sent_byte_size
            )
            assert action is LifetimeAction.CLOSE or self.lifetime.due_ns > now_ns, "it would spin"
            if action is not LifetimeAction.NOTHING:
                self.seen.append((now_ns / SECOND, action))
            if action is LifetimeAction.CLOSE:
                break
        return self.seen


def test_a_silent_peer_is_pinged_and_its_connection_closed_when_it_sends_nothing() -> None:
    assert Connection(RULES).run(1000) == [(100, LifetimeAction.PING), (120, LifetimeAction.CLOSE)]


def test_any_byte_after_the_ping_shows_that_the_peer_lives() -> None:
    connection = Connection(RULES)
    connection.run(100)
    connection.received_ns = 101 * SECOND
    assert connection.run(210) == [(100, LifetimeAction.PING), (201, LifetimeAction.PING)]


def test_a_peer_that_sends_is_not_pinged() -> None:
    connection = Connection(RULES)
    for time_s in range(0, 1000, 90):
        connection.received_ns = time_s * SECOND
        assert connection.run(time_s) == []


def test_a_connection_without_calls_is_pinged_only_where_that_is_permitted() -> None:
    assert Connection(RULES, calls=False).run(10_000) == []
    permitted = Connection(rules(permit_without_calls=True), calls=False)
    assert permitted.run(1000) == [(100, LifetimeAction.PING), (120, LifetimeAction.CLOSE)]


def acknowledge_pings(connection: Connection, until_s: float) -> list[float]:
    """Have the peer acknowledge each ping within a second; returns when it was pinged."""
    while connection.lifetime.due_ns <= until_s * SECOND:
        count = len(connection.seen)
        now_ns = connection.lifetime.due_ns
        connection.run(now_ns / SECOND)
        if len(connection.seen) > count:
            connection.received_ns = now_ns + SECOND
    return [time_s for time_s, action in connection.seen if action is LifetimeAction.PING]


def test_the_number_of_pings_without_data_is_limited() -> None:
    assert len(acknowledge_pings(Connection(RULES), 10_000)) == 2
    assert len(acknowledge_pings(Connection(rules(max_pings_without_data=0)), 1300)) > 8


def test_data_that_was_sent_allows_pings_again() -> None:
    connection = Connection(RULES)
    assert len(acknowledge_pings(connection, 1000)) == 2
    connection.sent_byte_size = 100
    assert len(acknowledge_pings(connection, 2000)) == 4


# ---- age ------------------------------------------------------------------------------------

NEVER_SILENT = rules(time_ns=1000 * HOUR)


def test_a_connection_that_is_too_old_drains_and_its_calls_have_a_grace_period() -> None:
    aging = msgspec.structs.replace(NEVER_SILENT, max_age_ns=50 * SECOND, max_age_grace_ns=5 * SECOND)
    assert Connection(aging).run(1000) == [(50, LifetimeAction.DRAIN), (55, LifetimeAction.CLOSE)]


def test_without_a_grace_period_calls_of_an_old_connection_take_as_long_as_they_need() -> None:
    aging = msgspec.structs.replace(NEVER_SILENT, max_age_ns=50 * SECOND)
    assert Connection(aging).run(1000) == [(50, LifetimeAction.DRAIN)]


@pytest.mark.parametrize(("jitter", "end_s"), [(-1, 45), (0.5, 52.5), (1, 55)])
def test_maximum_ages_differ_by_up_to_a_tenth(jitter: float, end_s: float) -> None:
    aging = msgspec.structs.replace(NEVER_SILENT, max_age_ns=50 * SECOND)
    assert Connection(aging, jitter=jitter).run(1000) == [(end_s, LifetimeAction.DRAIN)]


def test_an_old_connection_with_a_silent_peer_is_closed_as_well() -> None:
    aging = rules(max_age_ns=50 * SECOND)
    assert Connection(aging).run(1000) == [
        (50, LifetimeAction.DRAIN),
        (100, LifetimeAction.PING),
        (120, LifetimeAction.CLOSE),
    ]


# ---- in a connection ------------------------------------------------------------------------

CALL_BLOCK = encode_block([(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("te", "trailers")])


def ended(connection: H2Connection, octets: bytes) -> bool:
    """Receive `octets`, all at the same time; returns whether the connection has ended."""
    connection.receiving.receive(memoryview(octets), SECOND)
    return connection.sending.ended


def test_a_connection_ends_with_the_ping_that_is_one_too_many() -> None:
    connection = H2Connection(RULES)
    assert not ended(connection, frames.PREFACE + frames.settings([]) + frames.PING_REQUEST * 3)
    assert ended(connection, frames.PING_REQUEST)
    goaway = frames.goaway(0, frames.H2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
    assert b"".join(connection.sending.write_queue.take()).endswith(goaway)


def test_acknowledgements_do_not_forgive_pings_and_responses_do() -> None:
    connection = H2Connection(RULES)
    assert not ended(connection, frames.PREFACE + frames.settings([]) + frames.PING_REQUEST * 3)
    number = 1
    for _ in range(10):
        head = frames.frame_header(len(CALL_BLOCK), frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number)
        assert not ended(connection, head + CALL_BLOCK)
        connection.sending.send_trailers(connection.streams.by_id[number], status_trailers(0, None))
        assert not ended(connection, frames.PING_REQUEST * 3 + frames.settings([]))
        number += 2
    assert ended(connection, frames.PING_REQUEST)

"""Windows in both directions, and data that waits for them."""

from typing import Any

import pytest

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode, Setting
from protocols.grpc.h2.headers import request_head
from protocols.grpc.h2.streams import PeerLimits, PendingData, ReceiveWindow, Stream
from tests.protocols.grpc.h2.client_frames import FIELDS


def stream_with_window(send_window: int) -> Stream:
    return Stream(1, request_head(FIELDS), send_window)


def settings_payload(*entries: tuple[Setting, int]) -> memoryview:
    return memoryview(frames.settings(entries))[frames.FRAME_HEADER_BYTE_SIZE :]


# ---- what the client may send ---------------------------------------------------------------


def test_a_client_may_send_as_much_as_its_window_and_no_byte_more() -> None:
    window = ReceiveWindow(100)
    assert window.take(60)
    assert window.has_room(40)
    assert not window.has_room(41)
    assert not window.take(41)
    assert window.take(40), "what was refused is not counted"
    assert not window.take(1)


def test_a_window_opens_again_in_portions_of_a_quarter() -> None:
    window = ReceiveWindow(100)
    assert window.take(100)
    assert window.give_back(20) == 0
    assert not window.has_room(1), "the client does not know of it yet"
    assert window.give_back(5) == 25
    assert window.has_room(25)
    assert not window.has_room(26)
    assert window.give_back(75) == 75


# ---- what the client accepts ----------------------------------------------------------------


def test_a_client_accepts_the_defaults_before_its_settings() -> None:
    peer = PeerLimits()
    assert (peer.send_window, peer.initial_send_window, peer.max_frame_byte_size) == (65535, 65535, 16384)


def test_a_window_update_of_the_connection_opens_its_window() -> None:
    peer = PeerLimits()
    peer.open_send_window(1000)
    assert peer.send_window == 66535


@pytest.mark.parametrize(
    ("increment", "code"), [(0, H2ErrorCode.PROTOCOL_ERROR), (frames.MAX_WINDOW, H2ErrorCode.FLOW_CONTROL_ERROR)]
)
def test_a_window_update_of_the_connection_by_nothing_or_too_much_is_an_error(
    increment: int, code: H2ErrorCode
) -> None:
    with pytest.raises(ConnectionFailure) as caught:
        PeerLimits().open_send_window(increment)
    assert caught.value.code is code


def test_another_initial_window_changes_new_and_open_streams_by_the_difference() -> None:
    peer, stream = PeerLimits(), stream_with_window(1000)
    peer.apply_settings(settings_payload((Setting.INITIAL_WINDOW_SIZE, 65535 - 3000)), [stream])
    assert peer.initial_send_window == 65535 - 3000
    assert stream.send_window == -2000, "a window may become negative (RFC 9113, 6.9.2)"
    assert peer.send_window == 65535, "the connection has no initial window in SETTINGS"


def test_larger_frames_are_used_up_to_our_own_limit() -> None:
    peer = PeerLimits()
    peer.apply_settings(settings_payload((Setting.MAX_FRAME_SIZE, 20_000)), [])
    assert peer.max_frame_byte_size == 20_000
    peer.apply_settings(settings_payload((Setting.MAX_FRAME_SIZE, 2**24 - 1)), [])
    assert peer.max_frame_byte_size == limits.MAX_FRAME_BYTE_SIZE


def test_settings_that_mean_nothing_here_are_ignored() -> None:
    peer = PeerLimits()
    peer.apply_settings(settings_payload((Setting.HEADER_TABLE_SIZE, 0), (Setting.ENABLE_PUSH, 0)), [])
    assert (peer.send_window, peer.initial_send_window, peer.max_frame_byte_size) == (65535, 65535, 16384)


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        (Setting.ENABLE_PUSH, 2, H2ErrorCode.PROTOCOL_ERROR),
        (Setting.MAX_FRAME_SIZE, 2**14 - 1, H2ErrorCode.PROTOCOL_ERROR),
        (Setting.MAX_FRAME_SIZE, 2**24, H2ErrorCode.PROTOCOL_ERROR),
        (Setting.INITIAL_WINDOW_SIZE, 2**31, H2ErrorCode.FLOW_CONTROL_ERROR),
        (Setting.INITIAL_WINDOW_SIZE, 2**31 - 1, H2ErrorCode.FLOW_CONTROL_ERROR),  # too large for the open stream
    ],
)
def test_settings_with_impossible_values_are_errors(setting: Setting, value: int, code: H2ErrorCode) -> None:
    with pytest.raises(ConnectionFailure) as caught:
        PeerLimits().apply_settings(settings_payload((setting, value)), [stream_with_window(2**30)])
    assert caught.value.code is code


# ---- data that waits ------------------------------------------------------------------------


def test_waiting_data_is_taken_in_any_sizes_without_a_copy() -> None:
    memory, log = bytearray(b"defghij"), list[Any]()
    pending = PendingData()
    pending.add([b"abc", memoryview(memory)], lambda: log.append("released"))
    assert (pending.is_waiting, pending.byte_size) == (True, 10)
    assert [bytes(part) for part in pending.take(2)] == [b"ab"]
    parts = pending.take(4)
    memory[:2] = b"DE"
    assert [bytes(part) for part in parts] == [b"c", b"DEf"]
    assert [bytes(part) for part in pending.take(4)] == [b"ghij"]
    assert pending.byte_size == 0
    assert log == []


def test_data_that_is_dropped_is_released_once() -> None:
    log = list[Any]()
    pending = PendingData()
    pending.add([b"abc"], lambda: log.append("released"))
    pending.close()
    pending.close()
    assert log == ["released"]
    assert (pending.is_waiting, pending.byte_size) == (False, 0)


def test_a_release_that_was_taken_is_called_by_its_taker_only() -> None:
    log = list[Any]()
    pending = PendingData()
    pending.add([b"abc"], lambda: log.append("released"))
    release = pending.take_release()
    pending.close()
    assert log == []
    assert release is not None
    release()
    assert log == ["released"]
    assert pending.take_release() is None


def test_progress_ends_a_stall() -> None:
    pending = PendingData()
    pending.add([b"abc"])
    pending.stalled_ns = 5
    pending.take(1)
    assert pending.stalled_ns is None

"""Calls of forked processes: what becomes of them when one side fails."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from backends.worker.forked_calls import ForkedCalls, ForkedChildren
from backends.worker.model_calls import CallRequest, ModelCall
from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUEST = CallRequest("other", [])


@pytest.fixture
def door() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


class _Calls:
    """The calls of a worker, whose responses cannot be read."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def start(self, request: CallRequest) -> ModelCall:
        return ModelCall(1, streaming=False)

    def wait(self, call: ModelCall) -> Any:
        raise InternalError("the response cannot be read")

    def cancel(self, call: ModelCall) -> None:
        self.ended.append("cancelled")

    def discard(self, call: ModelCall) -> None:
        self.ended.append("discarded")


def test_a_worker_that_has_ended_is_an_error_and_no_file_stays_open(door: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = door
    theirs.close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InternalError, match="has ended"):
        ForkedCalls(ours).start(REQUEST)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_may_not_open_more_files_gets_an_error_that_says_so(
    door: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", full)
    with pytest.raises(InternalError, match="Too many open files"):
        ForkedCalls(door[0]).start(REQUEST)


def test_a_call_whose_response_cannot_be_sent_does_not_stay_open(
    door: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)  # it could not be undone
    calls: Any = _Calls()
    children = ForkedChildren(calls, lambda _: None)
    asked = msgspec.msgpack.encode(["call", "other", [], "", [], "", 0, 0, 0, 0, {}, False, None, None, 0])
    door[0].sendall(len(asked).to_bytes(8, "little") + asked)
    with pytest.raises(InternalError):
        children._serve_child(door[1])
    assert calls.ended == ["cancelled", "discarded"]

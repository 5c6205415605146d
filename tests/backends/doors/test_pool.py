"""What the kernel checks of a file that a front door in a process of its own sends as a connection."""

from __future__ import annotations

import os
import socket

import pytest

from backends.doors.pool import stream_socket


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_connection_is_taken() -> None:
    ours, theirs = socket.socketpair()
    with stream_socket(ours.detach()) as taken:
        theirs.sendall(b"x")
        assert taken.recv(1) == b"x"
    theirs.close()


def test_a_file_that_is_no_socket_is_refused_and_closed() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ValueError, match="a connection that is no socket"):
        stream_socket(reading)
    assert not is_open(reading)


def test_a_socket_that_is_no_stream_is_refused_and_closed() -> None:
    fd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach()
    with pytest.raises(ValueError, match="no stream socket"):
        stream_socket(fd)
    assert not is_open(fd)

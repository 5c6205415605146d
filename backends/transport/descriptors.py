"""File descriptors in received messages (`socket.recv_fds` of Python 3.11 ignores its flags)."""

from __future__ import annotations

import array
import socket


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> array.array[int]:
    """Return the descriptors in the ancillary data that `recvmsg` has received. The caller owns them."""
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return fds

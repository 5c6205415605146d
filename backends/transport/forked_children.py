"""What a process that a model forks does with the connections of its worker: it leaves them to its parent.

Else a child that raises, or returns from `execute`, would go on as if it were the worker: it would respond to the
parent's requests, write into the parent's outbox, and end the connection when it ends.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from backends.transport.channel import BlockingChannel

#: The worker's ends of connections in this process.
_channels: WeakSet[BlockingChannel] = WeakSet()


def leave_to_parent(channel: BlockingChannel) -> None:
    """In processes that this one forks from now on, it is as if the kernel had closed `channel`."""
    if not _channels:
        os.register_at_fork(after_in_child=_leave_all)
    _channels.add(channel)


def _leave_all() -> None:
    for channel in _channels:
        channel._outbox = None
        _end(channel._socket)


def _end(sock: socket.socket) -> None:
    """Put a socket whose other end is closed in the place of `sock`, which stays open in the parent."""
    if sock.fileno() < 0:  # closed
        return
    try:
        ours, theirs = socket.socketpair()
    except OSError:  # no descriptor is left
        sock.close()
        return
    theirs.close()
    os.dup2(ours.fileno(), sock.fileno(), inheritable=False)
    ours.close()

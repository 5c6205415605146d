"""A process that a model forks leaves the connection of its worker to its parent."""

from __future__ import annotations

import socket
import subprocess
import sys

#: A worker whose connection is standard input. Its child reads and sends, and writes what it gets.
FORKS = """
import os, socket, sys
from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.transport.forked_children import leave_to_parent

worker = BlockingChannel(socket.socket(fileno=os.dup(0)))
leave_to_parent(worker)
child = os.fork()
if not child:
    print("child reads", worker.receive())
    try:
        worker.send(wire.Detach(1))
    except BrokenPipeError:
        print("child sends to nobody", flush=True)
    worker.close()
    os._exit(0)
os.waitpid(child, 0)
worker.send(wire.Detach(7))
"""


def test_a_child_neither_speaks_for_its_parent_nor_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = subprocess.run(
            [sys.executable, "-c", FORKS], stdin=theirs.fileno(), capture_output=True, text=True, timeout=50, check=True
        )
        assert found.stdout == "child reads None\nchild sends to nobody\n"
        assert b"Detach" in ours.recv(1000)
        theirs.shutdown(socket.SHUT_RDWR)
        assert ours.recv(1000) == b""

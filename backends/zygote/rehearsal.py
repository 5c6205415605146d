"""What each worker does first, done before the forks: then workers share the memory that it changes.

The interpreter writes to a function's memory when the function runs for the first times: counters and caches in its
code. After a fork each such page becomes the worker's own. A backend may have a module `rehearsal` beside it, with a
function `rehearse` that does the same for its own first steps, starts no thread and leaves nothing behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket

from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.worker.loop import Worker

#: After the first rounds the interpreter changes little more.
_ROUNDS = 3

_CONFIG = '{"name":"m","backend":"b"}'


def rehearse(backend_module: str) -> None:
    """Rehearse the start of a worker whose backend is in this module. Leaves nothing behind."""
    name = f"{backend_module.rpartition('.')[0]}.rehearsal"
    own = importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
    for _ in range(_ROUNDS):
        _make_worker()
        _take_messages()
        if own is not None:
            own.rehearse()


def _make_worker() -> None:
    ours, others = socket.socketpair()
    Worker(BlockingChannel(ours)).close()
    others.close()


def _take_messages() -> None:
    for message in (wire.Complete(_CONFIG, "/m", 1), wire.Load(_CONFIG, "/m", 1, "m_0"), wire.Joined()):
        wire.to_worker_decoder.decode(wire.encoder.encode(message))
    for response in (wire.Hello(wire.PROTOCOL, 1), wire.Completed(_CONFIG), wire.Loaded()):
        wire.encoder.encode(response)

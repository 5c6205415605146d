"""A whole worker in a thread of the test, which plays the kernel at the other end of the connection."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from backends.base import Backend
from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.transport.outbox import OutboxReader
from backends.worker.loop import Worker
from backends.worker.request import OutputValue
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import Config, Host, ModelArguments, Timings
    from backends.worker.request import WorkerRequest

    Execute = Callable[[Sequence[WorkerRequest]], None]

CONFIG = '{"name": "m", "backend": "scripted"}'
LOAD = wire.Load(CONFIG, "/models/m", 1, "m_0", arena_byte_size=1 << 20)
LARGE = np.arange(2048, dtype=np.float32)

Expected = TypeVar("Expected", bound=wire.Message)


class Scripted(Backend):
    """A backend that does what the test says."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.loaded: ModelArguments | None = None
        self.finalized = 0
        self.on_load: Callable[[], None] = lambda: None
        self.on_execute: Execute = echo

    def complete(self, arguments: ModelArguments) -> Config:
        self.on_load()
        return {**arguments.config, "max_batch_size": 4}

    def load(self, arguments: ModelArguments) -> None:
        self.on_load()
        self.loaded = arguments

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        timings.inputs_ready()
        self.on_execute(requests)
        timings.inferred()

    def finalize(self) -> None:
        self.finalized += 1


class RespondingLater(Scripted):
    responds_later = True


def echo(requests: Sequence[WorkerRequest]) -> None:
    for request in requests:
        request.respond([OutputValue("OUT", "FP32", request.inputs[0].as_numpy())])


class Bench:
    """A worker with a scripted backend, and the kernel's end of its connection."""

    def __init__(self) -> None:
        self.backend: Scripted | None = None
        self._outbox: OutboxReader | None = None
        self.kind: type[Scripted] = Scripted
        #: What the backend does, also when it is made later.
        self.on_load: Callable[[], None] = lambda: None
        ours, theirs = socket.socketpair()
        self.channel = BlockingChannel(ours)
        self._socket = ours
        self._messages: deque[wire.ToKernel] = deque()
        self._thread = threading.Thread(target=self._run, args=[theirs])
        self._thread.start()

    def _run(self, sock: socket.socket) -> None:
        worker = Worker(BlockingChannel(sock))
        worker.run()
        worker.close()

    def make_backend(self, host: Host) -> Scripted:
        self.backend = self.kind(host)
        self.backend.on_load = self.on_load
        return self.backend

    def send(self, *messages: wire.ToWorker) -> None:
        for message in messages:
            self.channel.send(message)

    def next(self, kind: type[Expected]) -> Expected:
        """Wait for the worker's next message, which is one of `kind`."""
        while not self._messages:
            raw = self.channel.receive()
            assert raw is not None, "the worker has ended"
            self._messages += map(wire.to_kernel_decoder.decode, raw)
        message = self._messages.popleft()
        assert isinstance(message, kind)
        return message

    def hello(self) -> wire.Hello:
        """Return the worker's hello, and take the outbox that follows it."""
        hello = self.next(wire.Hello)
        self.next(wire.OutboxCreated)
        fd = self.channel.take_fd()
        self._outbox = OutboxReader(fd)
        os.close(fd)
        return hello

    @property
    def outbox(self) -> OutboxReader:
        assert self._outbox is not None, "after `hello`"
        return self._outbox

    def load(self, on_execute: Execute = echo, *, kind: type[Scripted] = Scripted) -> Scripted:
        """Load the model, whose `execute` is `on_execute`."""
        self.hello()
        self.kind = kind
        self.send(LOAD)
        self.next(wire.Loaded)
        assert self.backend is not None
        self.backend.on_execute = on_execute
        return self.backend

    def stop(self) -> None:
        """Stop the worker and wait for its end."""
        self.send(wire.Stop())
        self.join()

    def join(self) -> None:
        self._thread.join()
        assert self.channel.receive() is None, "nothing is left unread"
        self.channel.close()

    def leave(self) -> None:
        """Let the kernel be gone, wait for the worker's end, and close what came from it."""
        self.channel.close()
        self._thread.join()
        if self._outbox is not None:
            self._outbox.close()
        with contextlib.suppress(IndexError):  # no more
            while True:
                os.close(self.channel.take_fd())


def request(number: int, data: bytes = bytes(8), span: Span | None = None) -> wire.RequestMessage:
    tensor = Tensor("IN", "FP32", [2], data) if span is None else Tensor("IN", "FP32", [2048], None, span)
    return wire.RequestMessage(number, [tensor])

"""The models of a process that several share (`naiad.worker`): each has a connection, a `Worker` and a thread.

The process has a connection of its own, without a model, over which the kernel adds models. A model whose connection
ends leaves; the others stay. `Turn` decides which model executes: one at a time, in the order of their requests.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from backends.transport import wire
from backends.transport.channel import BlockingChannel, leave_to_parent
from kernel.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ModelArguments

logger = logging.getLogger(__name__)


#: How long a process may take to open the connection of a model, in seconds.
CONNECT_TIMEOUT_S = 10.0


class TakesTurns(Protocol):
    """One of the models of a process."""

    def enter_turn(self) -> None:
        """Its turn begins, and another model had the last one, or none."""

    def leave_turn(self) -> None:
        """Another model's turn begins."""


class Member(TakesTurns, Protocol):
    """The worker of one model."""

    def run(self) -> None:
        """Handle messages until the kernel sends `Stop` or the connection has ended."""

    def close(self) -> None:
        """Free the memory and the descriptors of the model. It runs no more."""


def not_shared(arguments: ModelArguments, where: str = "") -> Unsupported:
    """Return the error of a model whose backend cannot be in a process with others; `where` limits that."""
    return Unsupported(
        f"model '{arguments.model_name}' cannot share a worker{where} (parameter naiad.worker): its backend "
        f"'{arguments.config.get('backend', '')}' does not support it"
    )


def _opened(message: wire.AddMember) -> socket.socket:
    """Return a connection to the address of `message`, over which its token was sent. Raises `OSError`, ValueError."""
    host, _, port = message.address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(message.token)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


class Members:
    """Starts the threads of models, and tells the kernel of each that has ended."""

    def __init__(
        self, send: Callable[[wire.ToKernel], None], new_member: Callable[[BlockingChannel, Turn], Member]
    ) -> None:
        """`send` sends over the process's own connection; any thread may call it."""
        self._send = send
        self._new_member = new_member
        self._turn = Turn()

    def add(self, message: wire.AddMember, take_fd: Callable[[], int]) -> None:
        """Start the worker of a model, on a connection of its own.

        `take_fd` returns the descriptor of the connection, which the worker owns from now on. It is not called for a
        message with an address: then the worker opens the connection.
        """
        sock = None if message.address else socket.socket(fileno=take_fd())
        threading.Thread(target=self._run, args=(message, sock), name=message.title, daemon=True).start()

    def _run(self, message: wire.AddMember, sock: socket.socket | None) -> None:
        """Run the worker on `sock`, or on a connection that it opens."""
        if sock is None:
            try:
                sock = _opened(message)
            except (OSError, ValueError) as error:
                logger.error("the connection of '%s' to %s cannot be opened: %s", message.title, message.address, error)
                self._send(wire.MemberEnded(message.member, f"it cannot connect to {message.address}: {error}"))
                return
        channel = BlockingChannel(sock)
        leave_to_parent(channel, sock)
        failure, member = "", None
        try:
            member = self._new_member(channel, self._turn)
            try:
                member.run()
            finally:
                self._turn.forget(member)
                member.close()
        except Exception as error:
            logger.exception("the worker of a model failed")
            failure = f"{type(error).__name__}: {error}"
        channel.close()
        self._send(wire.MemberEnded(message.member, failure))
        member = None
        # Objects of a loaded model are frozen (`Worker._load`). Those of the one that has ended are garbage now.
        gc.unfreeze()
        gc.collect()
        gc.freeze()


class Turn:
    """A fair lock: threads get it in the order in which they asked.

    A lock of Python would often go to the thread that has just released it. Changes to the interpreter for one model
    (`TakesTurns`) are made only when another model executes, so that many requests in a row to one model need none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()
        self._last: TakesTurns | None = None

    @contextlib.contextmanager
    def of(self, model: TakesTurns) -> Iterator[None]:
        """Wait for the turn of `model`; it ends with the `with` block."""
        self._take()
        try:
            self._enter(model)
            yield
        finally:
            self._give_on()

    @contextlib.contextmanager
    def given_on(self, model: TakesTurns) -> Iterator[None]:
        """Within a turn of `model`: let others have theirs in the `with` block, and wait for the turn after it."""
        self._give_on()
        try:
            yield
        finally:
            self._take()
            self._enter(model)

    def forget(self, model: TakesTurns) -> None:
        """The model has ended."""
        self._take()
        try:
            if self._last is model:
                self._last = None
                model.leave_turn()
        finally:
            self._give_on()

    def _enter(self, model: TakesTurns) -> None:
        if self._last is model:
            return
        last, self._last = self._last, None
        if last is not None:
            last.leave_turn()
        model.enter_turn()
        self._last = model

    def _take(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def _give_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

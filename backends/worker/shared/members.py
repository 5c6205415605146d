"""The models of a process that several share (`naiad.worker`): each has a connection, a `Worker` and a thread.

They execute in turn (`backends.worker.shared.turn`). The process has a connection of its own, without a model, over
which the kernel adds models. A model whose connection ends leaves; the others stay.
"""

from __future__ import annotations

import gc
import logging
import socket
import threading
from typing import TYPE_CHECKING, Protocol

from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.transport.forked_children import leave_to_parent
from backends.worker.shared.turn import Turn
from kernel.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ModelArguments

logger = logging.getLogger(__name__)


#: How long a process may take to open the connection of a model, in seconds.
CONNECT_TIMEOUT_S = 10.0


class Member(Protocol):
    """The worker of one model."""

    def run(self) -> None:
        """Handle messages until the kernel sends `Stop` or the connection has ended."""

    def close(self) -> None:
        """Free the memory and the descriptors of the model. It runs no more."""

    def enter_turn(self) -> None:
        """See `TakesTurns`."""

    def leave_turn(self) -> None:
        """See `TakesTurns`."""


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
        """`send` is that of the process's own connection; any thread may call it."""
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

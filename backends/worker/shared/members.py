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


class Members:
    """Starts the threads of models, and tells the kernel of each that has ended."""

    def __init__(
        self, send: Callable[[wire.ToKernel], None], new_member: Callable[[BlockingChannel, Turn], Member]
    ) -> None:
        """`send` is that of the process's own connection; any thread may call it."""
        self._send = send
        self._new_member = new_member
        self._turn = Turn()

    def add(self, message: wire.AddMember, fd: int) -> None:
        """Start the worker of a model, on the connection `fd`, which it owns from now on."""
        sock = socket.socket(fileno=fd)
        channel = BlockingChannel(sock)
        leave_to_parent(channel, sock)
        thread = threading.Thread(target=self._run, args=(message.member, channel), name=message.title, daemon=True)
        thread.start()

    def _run(self, number: int, channel: BlockingChannel) -> None:
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
        self._send(wire.MemberEnded(number, failure))
        member = None
        # Objects of a loaded model are frozen (`Worker._load`). Those of the one that has ended are garbage now.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

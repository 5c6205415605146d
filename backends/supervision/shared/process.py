"""A worker process of several models: started with the first, ended after the last, started once after a loss."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from backends.supervision.launcher import not_shown
from backends.supervision.output.worker_output import WorkerOutput
from backends.supervision.session import WorkerSession
from backends.supervision.shared.member import SharedWorker
from backends.transport import wire
from kernel.errors import Unavailable, Unsupported
from kernel.loop.clock import LoopClock
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds

if TYPE_CHECKING:
    import socket
    from collections.abc import Hashable

    from backends.supervision.launcher import Announce, Launcher, Pending
    from backends.supervision.output.limits import OutputLimits

logger = logging.getLogger(__name__)

#: How long the process may take to end after its last model, in seconds. Then it is killed.
END_GRACE_S = 5.0

#: How many of the other models a cause names.
_NAMED = 5


class SharedProcess:
    """Implements `Launcher` for the models of one shared worker, by way of the launcher that starts processes."""

    def __init__(self, name: str, launcher: Launcher, limits: OutputLimits) -> None:
        """`limits` are for what each model logs; what the process prints is the process's, with limits of its own."""
        self.name = name
        self._launcher = launcher
        self._limits = limits
        self._starting = asyncio.Lock()
        #: Whether the process is for instances on GPUs.
        self._gpu = False
        #: The process's own connection; None while there is no process, or only one that ends.
        self._session: WorkerSession | None = None
        self._members: dict[int, SharedWorker] = {}
        self._last_number = 0
        #: The numbers of models whose connection is being opened, each with why its end of it has ended; "" if not.
        self._connecting: dict[int, str] = {}
        #: Processes that were asked to end, each with the timer that kills it.
        self._ending: dict[WorkerSession, asyncio.TimerHandle] = {}
        self._none_ending = asyncio.Event()
        self._none_ending.set()

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> SharedWorker:
        """Add a model to the process, which is started for its needs if there is none.

        Raises `OSError` or `ServingError`.
        """
        assert not helper, "helpers have processes of their own"
        async with self._starting:
            self.check(title, needs)
            if self._session is None:
                self._gpu = needs.gpu
                session = WorkerSession(f"worker {self.name}")
                session.take_messages({wire.MemberEnded: self._member_ended})
                session.on_lost = lambda cause: self._lost(session, cause)
                try:
                    await session.start(self._launcher, needs=needs, pending=pending)
                except BaseException:
                    session.kill()
                    raise
                if session.lost:
                    raise Unavailable(f"worker '{self.name}' was lost when it had just started")
                self._session = session
            return await self._add(self._session, title)

    def check(self, title: str, needs: WorkerNeeds) -> None:
        """Raise `Unsupported` if an instance with these needs cannot be in the process as it was started."""
        if self._session is not None and needs.gpu != self._gpu:
            one, other = ("a GPU", "the CPU") if needs.gpu else ("the CPU", "GPUs")
            raise Unsupported(
                f"model instance '{title}' cannot share worker '{self.name}' (parameter naiad.worker): it is on {one}, "
                f"and the process was started for models on {other}. Models on GPUs share another worker, and name "
                "KIND_GPU in their instance groups"
            )

    async def _add(self, session: WorkerSession, title: str) -> SharedWorker:
        """Add a model over a connection that the launcher of the process gives. Raises `OSError` or `ServingError`."""
        self._last_number += 1
        number = self._last_number

        def announce(fd: int | None = None, *, address: str = "", token: bytes = b"") -> None:
            message = wire.AddMember(number, title, address, token)
            if fd is None:
                session.send(message)
            else:
                session.send_with_fd(message, fd)

        self._connecting[number] = ""
        try:
            sock = await session.connect(announce)
        except BaseException:
            del self._connecting[number]
            self._end_without_members(session)
            raise
        failure = self._connecting.pop(number)
        if failure or self._session is not session:
            sock.close()
            self._end_without_members(session)
            cause = failure or "the worker was lost"
            raise Unavailable(f"model instance '{title}' did not get into worker '{self.name}': {cause}")
        member = SharedWorker(title, sock, WorkerOutput(title, self._limits, LoopClock()), self)
        self._members[number] = member
        return member

    # ---- HostProcess -------------------------------------------------------------------------

    def folder(self, path: str) -> str:
        assert self._session is not None, "the process has ended"
        return self._session.folder(path)

    async def connect(self, announce: Announce) -> socket.socket:
        assert self._session is not None, "the process has ended"
        return await self._session.connect(announce)

    @property
    def stopped(self) -> bool:
        return self._session is not None and self._session.stopped

    @property
    def work_mark(self) -> Hashable:
        return None if self._session is None else self._session.work_mark

    def write_stacks(self) -> None:
        if self._session is not None:
            self._session.write_stacks()

    def terminate(self) -> None:
        if self._session is not None:
            self._session.terminate()

    def kill(self) -> None:
        if self._session is not None:
            self._session.kill()

    async def emptied(self) -> None:
        if not self._members:
            await self._none_ending.wait()

    # ---- news --------------------------------------------------------------------------------

    def _member_ended(self, message: wire.MemberEnded) -> None:
        if message.member in self._connecting:
            self._connecting[message.member] = message.failure or "it has ended"
            return
        if message.member not in self._members:
            raise ValueError(f"member {message.member} has ended, which is not in the process")
        member = self._members.pop(message.member)
        assert self._session is not None
        self._end_without_members(self._session)
        member.ended(message.failure or "it has ended")

    def _end_without_members(self, session: WorkerSession) -> None:
        """Let the process end if it has no model, and none comes to it. A model that comes later gets a new one."""
        if self._members or self._connecting or self._session is not session:
            return
        self._session = None
        self._ending[session] = asyncio.get_running_loop().call_later(END_GRACE_S, session.kill)
        self._none_ending.clear()
        session.send(wire.Stop())

    def _lost(self, session: WorkerSession, cause: str) -> None:
        timer = self._ending.pop(session, None)
        if timer is not None:
            timer.cancel()
            if not self._ending:
                self._none_ending.set()
            return
        self._session = None
        members, self._members = list(self._members.values()), {}
        if members:
            logger.error("worker '%s' of %d models was lost: %s", self.name, len(members), cause)
        for member in members:
            others = [other.title for other in members if other is not member]
            member.ended(f"{cause}{_shared(self.name, others)}")


def _shared(name: str, others: list[str]) -> str:
    """Return what a cause says of the models that were lost together."""
    if not others:
        return f"; it was the only model of worker '{name}'"
    names = ", ".join(f"'{other}'" for other in others[:_NAMED])
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    return f"; it shared worker '{name}' with {names}{more}"

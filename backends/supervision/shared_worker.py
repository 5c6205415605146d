"""Worker processes that several models share (`naiad.worker`).

`SharedWorker` is one model of such a process, as the supervision of its instance sees it: a `Launched` worker.
`SharedProcess` is the process: started with the first model, ended after the last, started once after a loss.
`SharedWorkers` has the processes of a server by name, and says which instances may be in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING

from backends.launch.launcher import KILL_WAIT_S, not_shown
from backends.launch.output import WorkerOutput
from backends.supervision.session import WorkerSession
from backends.transport import wire
from kernel.errors import Unavailable, Unsupported
from kernel.loop.clock import LoopClock
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from backends.launch.launcher import Announce, Launcher, Pending
    from backends.launch.output import OutputLimits
    from kernel.repository.placement import InstancePlan

logger = logging.getLogger(__name__)

#: How long a model may take to leave after its connection was ended, in seconds. Then its process is killed.
LEAVE_GRACE_S = 2.0


class SharedWorker:
    """Implements `Launched`. A thread cannot be killed: a model that does not leave is ended with its process."""

    def __init__(self, title: str, sock: socket.socket, output: WorkerOutput, process: SharedProcess) -> None:
        """The channel that uses `sock` owns it."""
        self.title = title
        self.socket = sock
        self.host = ""
        self.unreachable = False
        self.output = output
        self._process = process
        self._callback: Callable[[str], None] | None = None
        self._ended = asyncio.Event()
        self._cause = ""
        self._grace: asyncio.TimerHandle | None = None

    def folder(self, path: str) -> str:
        return self._process.folder(path)

    async def connect(self, announce: Announce) -> socket.socket:
        return await self._process.connect(announce)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        if self._ended.is_set():
            asyncio.get_running_loop().call_soon(callback, self._cause)
        else:
            self._callback = callback

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def stopped(self) -> bool:
        return not self._ended.is_set() and self._process.stopped

    @property
    def work_mark(self) -> Hashable:
        return None if self._ended.is_set() else self._process.work_mark

    def write_stacks(self) -> None:
        """Let the process write the stacks of all its members to its log."""
        if not self._ended.is_set():
            self._process.write_stacks()

    def terminate(self) -> None:
        """Send SIGTERM to the process, which ends all its members."""
        if not self._ended.is_set():
            logger.error("worker '%s' is ended with all its models because of '%s'", self._process.name, self.title)
            self._process.terminate()

    def kill(self) -> None:
        """End the connection, and soon the process, if the model does not leave: it executes, or loads without end."""
        if self._ended.is_set() or self._grace is not None:
            return
        with contextlib.suppress(OSError):  # the channel has closed it
            self.socket.shutdown(socket.SHUT_RDWR)
        self._grace = asyncio.get_running_loop().call_later(LEAVE_GRACE_S, self._kill_process)

    def _kill_process(self) -> None:
        logger.error("worker '%s' is killed with all its models: '%s' does not end", self._process.name, self.title)
        self._process.kill()

    async def stop(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            self._kill_process()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_WAIT_S):
                    await self._ended.wait()
        await self._process.emptied()

    def ended(self, cause: str) -> None:
        """The model has left, or its process has ended. Called once."""
        if self._grace is not None:
            self._grace.cancel()
        self._cause = cause
        self.output.close()
        self._ended.set()
        if self._callback is not None:
            self._callback(cause)


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


class SharedWorkers:
    """Gives each name its process, as a `Launcher`. Processors are a property of a process: all members have the same.

    An instance is known by its keeper, not by its name: a reloaded model has instances with the same names.
    """

    def __init__(self, launcher: Launcher, limits: OutputLimits) -> None:
        self._launcher = launcher
        self._limits = limits
        self._processes: dict[str, SharedProcess] = {}
        #: Name → instances that load or are loaded, by their keepers.
        self._members: dict[str, dict[object, InstancePlan]] = {}

    def launcher(self, name: str) -> Launcher:
        """Return what starts workers of the models that share the worker `name`."""
        if name not in self._processes:
            self._processes[name] = SharedProcess(name, self._launcher, self._limits)
        return self._processes[name]

    def join(self, keeper: object, plan: InstancePlan) -> None:
        """Count an instance, which is about to load. Raises `Unsupported` if it cannot be with those that are there."""
        process = self._processes.get(plan.needs.worker)
        if process is not None:
            process.check(plan.name, plan.needs)
        members = self._members.setdefault(plan.needs.worker, {})
        for other in members.values():
            if other.cpus != plan.cpus:
                raise Unsupported(
                    f"model instance '{plan.name}' cannot share worker '{plan.needs.worker}' (parameter naiad.worker) "
                    f"with '{other.name}': their host policies '{plan.host_policy}' and '{other.host_policy}' give "
                    f"them different processors ({_cpus(plan.cpus)} and {_cpus(other.cpus)})"
                )
        members[keeper] = plan

    def leave(self, keeper: object, plan: InstancePlan) -> None:
        """Count an instance no longer."""
        name = plan.needs.worker
        members = self._members.get(name, {})
        members.pop(keeper, None)
        if not members:
            self._members.pop(name, None)
            if ":" in name:  # of one load of a model, which does not come again
                self._processes.pop(name, None)


def _cpus(cpus: tuple[int, ...]) -> str:
    return ", ".join(map(str, cpus)) or "all"

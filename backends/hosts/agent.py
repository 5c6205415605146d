"""The agent of a host: starts workers there for servers on other hosts, watches them, and tells their servers.

A worker is a child process that the agent starts as a server would, with a TCP connection of its own to the server: no
tensor passes the agent. So a model that holds the interpreter stops no heartbeat.

The workers of a server whose control connection has ended are ended when it connects again, or after the lease: the
server has given them up, and has started others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from backends.hosts.link import MAX_TEXT, Link, prepare_socket
from backends.hosts.messages import (
    PROOF_S,
    Beat,
    Claim,
    Expected,
    LaunchWorker,
    NotAdmitted,
    NotStarted,
    Printed,
    Purpose,
    Refused,
    SignalWorker,
    Waits,
    Welcome,
    WorkerEnded,
    WorkerStarted,
    admit,
    decode_description,
    to_agent_decoder,
)
from backends.launch.children import KernelChildren
from backends.launch.launcher import KILL_WAIT_S
from backends.launch.local_process import GivenEnds
from backends.launch.output import OutputLimits, WorkerOutput
from backends.launch.spawning import ModelEnvironments, SpawningLauncher
from backends.launch.watcher_process import SessionWatcher
from backends.transport.wire import PROTOCOL
from kernel.errors import ErrorCode, InternalError, ServingError, Unavailable, failing_as
from kernel.file_threads import in_file_thread, in_own_thread
from kernel.loop.clock import LoopClock
from kernel.repository.execution_environment import ExecutionEnvironment
from kernel.repository.worker_needs import PreloadSet, WorkerNeeds

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from backends.hosts.encryption import Encryption
    from backends.hosts.files import BroughtFiles, ModelCopies
    from backends.hosts.messages import ToAgent
    from backends.launch.local_process import LocalProcess
    from kernel.repository.described_files import LaunchDescription
    from kernel.repository.execution_environment import EnvironmentSettings

logger = logging.getLogger(__name__)

#: How long no connection is accepted after one could not be.
ACCEPT_PAUSE_S = 0.1

#: How many connections may be about to prove that their side has the token.
MAX_UNPROVEN = 64


def surplus_of(peers: Sequence[str]) -> int:
    """Return which of these connections to end for a new one, given the peer of each from the oldest on.

    The oldest of the peer that has the most: so who connects often and says nothing keeps no other peer out. Pure.
    """
    return peers.index(max(Counter(peers).items(), key=lambda item: item[1])[0])


class AgentSettings(msgspec.Struct, frozen=True):
    """What the operator of a host says."""

    #: The name of the host, as servers show it.
    host: str
    token: bytes = b""
    #: The most workers at the same time; 0 for no limit.
    max_workers: int = 0
    #: How long workers may live without their server, in seconds.
    lease_s: float = 60.0
    #: Whether the agent is there for one connection of one server, which a launcher has placed it for: it ends with
    #: that connection, or if none has come after `lease_s`.
    single: bool = False


class SentOutput(WorkerOutput):
    """What a worker prints, sent to its server and not logged here."""

    def __init__(self, title: str, limits: OutputLimits, session: ServerSession, number: int) -> None:
        super().__init__(title, limits, LoopClock())
        self._session = session
        self._number = number

    def log_always(self, level: int, text: str) -> None:
        """Send a line; see `WorkerOutput`."""
        if not self._session.link.crowded:
            self._session.link.send(Printed(self._number, level, text[:MAX_TEXT]))


class HostedWorker:
    """A worker of a server, from its `LaunchWorker` to its end."""

    def __init__(self, message: LaunchWorker) -> None:
        self.title = message.title
        #: Set by its data connection.
        self.connection: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self.start: asyncio.Task[None] | None = None
        self.process: LocalProcess | None = None

    def signal(self, name: str) -> None:
        """Send a signal to the worker. One that is not started yet is not started."""
        if self.process is None:
            if name != "STACKS" and self.start is not None:
                self.start.cancel()
        elif name == "STACKS":
            self.process.write_stacks()
        elif name == "TERM":
            self.process.terminate()
        else:
            self.process.kill()


class ServerSession:
    """A control connection of a server, and its workers."""

    def __init__(self, agent: HostAgent, identity: bytes, peer: str) -> None:
        self._agent = agent
        self.identity = identity
        self.peer = peer
        self.server, self.epoch, self.limits = "", 0, OutputLimits()
        self.workers: dict[int, HostedWorker] = {}
        self.link = Link(to_agent_decoder, self._beat, self._take, self._lost)
        self._lease: asyncio.TimerHandle | None = None

    def _beat(self) -> Beat:
        return Beat(
            tuple(
                (number, worker.process.stopped, hash(worker.process.work_mark) & (1 << 62) - 1)
                for number, worker in self.workers.items()
                if worker.process is not None
            ),
            self._agent.worker_count - len(self.workers),
        )

    def _take(self, message: ToAgent) -> None:
        match message:
            case Beat():
                pass
            case Claim():
                self._claim(message)
            case _ if not self.server:
                raise ValueError(f"{type(message).__name__} before Claim")
            case LaunchWorker():
                self._launch(message)
            case SignalWorker():
                if (worker := self.workers.get(message.worker)) is not None:
                    worker.signal(message.name)

    def _claim(self, message: Claim) -> None:
        if message.protocol != PROTOCOL:
            self.link.send(
                Refused(
                    f"the agent on host '{self._agent.settings.host}' is of another version ({PROTOCOL}); the server's "
                    f"is {message.protocol}. Server and agents need the same version"
                )
            )
            self.link.close()
            self._agent.forget(self)
            return
        self.server, self.epoch = message.server, message.epoch
        self.limits = OutputLimits(message.lines_per_s, message.bytes_per_s)
        self._agent.end_earlier(self)
        others = sum(len(session.workers) for session in self._agent.sessions if session is not self)
        self.link.send(Welcome(self._agent.settings.host, self._agent.settings.max_workers, others))
        logger.info("server %s uses this host", self.peer)

    def _launch(self, message: LaunchWorker) -> None:
        number, most = message.worker, self._agent.settings.max_workers
        if number in self.workers or number < 1:
            raise ValueError(f"worker {number} was launched before")
        if most and self._agent.worker_count >= most:
            text = f"host '{self._agent.settings.host}' has {most} workers already (--max-workers of naiad agent)"
            self.link.send(NotStarted(number, ErrorCode.UNAVAILABLE.value, text, full=True))
            return
        worker = self.workers[number] = HostedWorker(message)
        worker.start = self._agent.run(self._start(message, worker))
        self.link.send(Expected(number))

    async def _start(self, message: LaunchWorker, worker: HostedWorker) -> None:
        """Start a worker, and tell the server how that ended."""
        number = message.worker
        try:
            with failing_as(functools.partial(self._start_failure, number), passes=ServingError):
                async with asyncio.timeout(PROOF_S):
                    sock = await worker.connection
                try:
                    folder = await self._start_with(sock, message, worker)
                finally:
                    sock.close()  # the worker has it
        except ServingError as error:
            self._not_started(number, error)
        except asyncio.CancelledError:
            self._not_started(number, Unavailable("the launch was ended"))
            raise
        else:
            assert worker.process is not None
            self.link.send(WorkerStarted(number, folder))
            worker.process.on_lost(lambda cause: self._ended(number, cause))

    def _start_failure(self, number: int, error: Exception) -> ServingError:
        """Return the error of a worker that could not be started. The agent and its other workers continue."""
        if isinstance(error, OSError):  # TimeoutError is one
            return Unavailable(f"its connection failed: {error}")
        logger.error("worker %d of server %s could not be started", number, self.peer, exc_info=error)
        return InternalError("the agent failed to start the worker; its log has the cause")

    def _not_started(self, number: int, error: ServingError) -> None:
        self.workers.pop(number, None)
        self.link.send(NotStarted(number, error.code.value, error.message[:MAX_TEXT]))
        self._agent.forget_if_over(self)

    async def _start_with(self, sock: socket.socket, message: LaunchWorker, worker: HostedWorker) -> str:
        """Take the files and start the worker; returns the folder of its model. Raises `OSError`, `ServingError`."""
        loop = asyncio.get_running_loop()
        number = message.worker
        description = await in_file_thread(decode_description, message.description)

        def say(text: str) -> None:
            loop.call_soon_threadsafe(self.link.send, Waits(number, text[:MAX_TEXT]))

        taking = asyncio.ensure_future(
            in_own_thread(
                f"files of {message.title}"[:60],
                self._agent.copies.take,
                sock,
                message.title,
                message.version,
                description,
                say,
            )
        )
        try:
            files = await asyncio.shield(taking)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):  # ends what the thread waits for
                sock.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError, ServingError):
                (await taking).release()
            raise
        try:
            needs = _needs(message, files, description)
            ends = GivenEnds(sock, SentOutput(message.title, self.limits, self, number))
            worker.process = await self._agent.spawning.launch_between(
                ends, message.title, needs=needs, pending=lambda text: self.link.send(Waits(number, text[:MAX_TEXT]))
            )
        except BaseException:
            files.release()
            raise
        worker.process.on_ended(files.release)
        return files.folder

    def _ended(self, number: int, cause: str) -> None:
        self.workers.pop(number, None)
        self.link.send(WorkerEnded(number, cause[:MAX_TEXT]))
        self._agent.forget_if_over(self)

    def _lost(self, cause: str) -> None:
        """The control connection has ended."""
        for worker in self.workers.values():
            if worker.process is None:
                worker.signal("KILL")
        lease_s = self._agent.settings.lease_s
        if self._agent.settings.single:  # nobody connects again
            self.end_workers()
        elif self.workers:
            logger.warning(
                "server %s is lost: %s. Its %d workers are ended in %g s, or when it connects again",
                self.peer, cause, len(self.workers), lease_s,
            )  # fmt: skip
            self._lease = asyncio.get_running_loop().call_later(lease_s, self.end_workers)
        self._agent.forget_if_over(self)

    def end_workers(self) -> None:
        """Kill all workers; nobody uses them any more."""
        if self._lease is not None:
            self._lease.cancel()
        for worker in list(self.workers.values()):
            worker.signal("KILL")


def _needs(message: LaunchWorker, files: BroughtFiles, description: LaunchDescription) -> WorkerNeeds:
    """Return the needs of the worker on this host."""
    folder, environment = files.folder, None
    if (described := description.environment) is not None:
        if described.requirements:
            environment = ExecutionEnvironment(requirements=os.path.join(folder, described.requirements))
        else:
            environment = ExecutionEnvironment(path=files.archive or os.path.join(folder, described.archive))
    file = os.path.join(folder, description.preload_file) if description.preload_file else ""
    return WorkerNeeds(
        message.backend,
        PreloadSet(description.preload_modules, file),
        environment=environment,
        memory_limit_byte_size=message.memory_limit_byte_size,
        folder=folder,
        version=message.version,
    )


class HostAgent:
    """The agent. `serve` is its whole life."""

    def __init__(
        self,
        settings: AgentSettings,
        copies: ModelCopies,
        environments: EnvironmentSettings,
        encryption: Encryption | None = None,
    ) -> None:
        """Without `encryption` connections are not encrypted."""
        self.settings = settings
        self.copies = copies
        self._encryption = encryption
        self.sessions: list[ServerSession] = []
        self._children = KernelChildren()
        self._watcher = SessionWatcher(self._children)
        self.spawning = SpawningLauncher(
            shared_memory=False,
            watcher=self._watcher,
            children=self._children,
            environments=ModelEnvironments(environments),
        )
        #: Connections that are about to prove that they have the token, from the oldest on, and the host of each peer.
        self._unproven: dict[asyncio.Task[None], str] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._stop = asyncio.Event()

    @property
    def worker_count(self) -> int:
        """How many workers live, or are being started, for all servers."""
        return sum(len(session.workers) for session in self.sessions)

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task of the agent."""
        assert self._tasks is not None
        return self._tasks.create_task(work)

    async def serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        """Take connections until `stop`; then end all workers."""
        listener.setblocking(False)
        self._stop = stop
        if self.settings.single:
            asyncio.get_running_loop().call_later(self.settings.lease_s, self._stop_if_unused)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                accepting = self._tasks.create_task(self._accept(listener))
                await stop.wait()
                accepting.cancel()
                await self._end_all()
        finally:
            if self._encryption is not None:
                self._encryption.close()
            await self._watcher.close()
            await self._children.close()

    async def _end_all(self) -> None:
        ended = [worker.process for session in self.sessions for worker in session.workers.values()]
        for session in list(self.sessions):
            session.link.end("the agent ends")  # first: so servers see a lost host, and not workers that were killed
            session.end_workers()
        await asyncio.gather(*(process.stop(KILL_WAIT_S) for process in ended if process is not None))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # such as too many open files
                logger.warning("a connection cannot be accepted: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                surplus = list(self._unproven)[surplus_of(list(self._unproven.values()))]
                del self._unproven[surplus]
                surplus.cancel()
            task = self.run(self._admit(sock, f"{address[0]}:{address[1]}"))
            self._unproven[task] = address[0]
            task.add_done_callback(functools.partial(self._admitted, sock))

    def _admitted(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        if task.cancelled():  # maybe before it has begun
            sock.close()

    async def _admit(self, sock: socket.socket, peer: str) -> None:
        """Find out what a connection is for, and give it to that."""
        given = False
        try:
            sock.setblocking(False)
            prepare_socket(sock)
            async with asyncio.timeout(PROOF_S):
                if self._encryption is not None:
                    sock = (await self._encryption.secure(sock)).socket
                    sock.setblocking(False)
                purpose = await admit(sock, self.settings.token)
            task = asyncio.current_task()
            assert task is not None
            self._unproven.pop(task, None)
            given = await self._give(sock, purpose, peer)
        except NotAdmitted as error:
            logger.warning("a connection from %s is refused: %s", peer, error)
        except (OSError, TimeoutError) as error:
            logger.debug("a connection from %s has failed: %s", peer, error)
        finally:
            if not given:
                sock.close()

    async def _give(self, sock: socket.socket, purpose: Purpose, peer: str) -> bool:
        """Give a connection to its session; returns whether there was one. Raises `OSError`."""
        if not purpose.worker:
            session = ServerSession(self, purpose.session, peer)
            self.sessions.append(session)
            await session.link.begin(sock)
            return True
        for session in self.sessions:
            if session.identity == purpose.session:
                worker = session.workers.get(purpose.worker)
                if worker is not None and not worker.connection.done():
                    sock.setblocking(True)
                    worker.connection.set_result(sock)
                    return True
        return False

    def end_earlier(self, new: ServerSession) -> None:
        """End the workers of earlier sessions of the same server."""
        for session in self.sessions:
            if session is not new and session.server == new.server and session.epoch < new.epoch:
                session.link.end("its server has connected again")
                session.end_workers()

    def forget_if_over(self, session: ServerSession) -> None:
        """Forget a session whose connection and workers have all ended."""
        if not session.link.open and not session.workers:
            self.forget(session)

    def forget(self, session: ServerSession) -> None:
        """Forget a session."""
        if session in self.sessions:
            self.sessions.remove(session)
            if self.settings.single:
                self._stop.set()

    def _stop_if_unused(self) -> None:
        if not self.sessions:
            logger.warning("no server has connected within %g s: the agent ends", self.settings.lease_s)
            self._stop.set()

"""Starts workers on other hosts by the agents there (`naiad agent`), over TCP.

The server connects to each agent, and again when the connection is lost. A launch takes the agent with the fewest
workers that has room, and waits if there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import select
import socket
from typing import TYPE_CHECKING, Any

from backends.hosts.encryption import Secured
from backends.hosts.files import SILENCE_S, send_files
from backends.hosts.link import MAX_FROM_AGENT, Link, prepare_socket
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
    encode_description,
    prove,
    to_server_decoder,
)
from backends.launch.launcher import KILL_WAIT_S, HostCapacity, OwnedWorker, not_shown
from backends.launch.output import OutputLimits, WorkerOutput
from backends.transport.wire import PROTOCOL
from kernel.background import BackgroundTasks
from kernel.errors import ErrorCode, ServingError, Unavailable, Unsupported, worker_error
from kernel.file_threads import in_file_thread, in_own_thread
from kernel.loop.clock import LoopClock
from kernel.repository.described_files import FileDigests, describe_launch
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds
from kernel.server_parts import LauncherFigures, ServerPart

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from backends.hosts.encryption import Encryption
    from backends.hosts.messages import ToServer
    from backends.launch.launcher import Announce, Pending
    from kernel.repository.described_files import LaunchDescription

logger = logging.getLogger(__name__)

#: How long to wait before an agent is connected to again, in seconds: first, and at most.
_RETRY_S, _MOST_RETRY_S = 0.2, 5.0

#: How long the reason of a failed launch may come after its data connection has ended, in seconds.
_REASON_S = 2.0

#: How long the end of a worker's data may come after its process has ended, and how often it is looked for, in seconds.
_DATA_S, _LOOK_S = 2.0, 0.005

_NOT_TRIED = "not tried yet"


class HostFull(Unavailable):
    """The host has got as many workers as it may have since it was chosen."""


class RemoteProcess:
    """A worker of another host. Implements `backends.launch.launcher.Launched`."""

    def __init__(self, agent: HostConnection, number: int, title: str, limits: OutputLimits) -> None:
        self._agent = agent
        self.number = number
        self.title = title
        self.host = agent.host
        self.unreachable = False
        self.socket = socket.socket(agent.family)
        self.output = WorkerOutput(title, limits, LoopClock())
        #: Done when the agent expects the connection, and when the worker runs, with its folder.
        self.expected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.pending: Pending = not_shown
        self.folders: dict[str, str] = {}
        self.stopped = False
        self._mark = 0
        self._callback: Callable[[str], None] | None = None
        self._ended = asyncio.Event()
        self._cause = ""

    def folder(self, path: str) -> str:
        """See `Launched`."""
        return self.folders.get(path, path)

    async def connect(self, announce: Announce) -> socket.socket:
        """Refuse, see `AgentLauncher.check`."""
        raise Unsupported("models that share a worker are on the machine of the server")

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """See `Launched`."""
        if self._ended.is_set():
            asyncio.get_running_loop().call_soon(callback, self._cause)
        else:
            self._callback = callback

    @property
    def has_ended(self) -> bool:
        """See `Launched`."""
        return self._ended.is_set()

    @property
    def work_mark(self) -> Hashable:
        """See `Launched`."""
        return self._mark

    def seen(self, *, stopped: bool, mark: int) -> None:
        """Note what the agent says of the process."""
        self.stopped, self._mark = stopped, mark

    def write_stacks(self) -> None:
        """See `Launched`."""
        self._agent.send(SignalWorker(self.number, "STACKS"))

    def terminate(self) -> None:
        """See `Launched`."""
        self._agent.send(SignalWorker(self.number, "TERM"))

    def kill(self) -> None:
        """See `Launched`."""
        self._agent.send(SignalWorker(self.number, "KILL"))

    async def stop(self, grace_s: float) -> None:
        """See `Launched`."""
        for wait_s in (grace_s, KILL_WAIT_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ended.wait()
                return
            self.output.log_always(logging.WARNING, f"the worker did not end within {wait_s:.1f} s and is killed")
            self.kill()

    def fail(self, error: ServingError) -> None:
        """The launch has failed."""
        for future in (self.expected, self.started):
            if not future.done():
                future.set_exception(error)
                future.exception()  # read here: the launch may have been cancelled, or not be there yet

    def ended_after_data(self, cause: str, waited_s: float = 0.0) -> None:
        """The worker has ended. What it has sent last comes over another connection, and may still be on its way.

        Called once, in place of `ended`.
        """
        if self._callback is None or waited_s >= _DATA_S or _is_at_its_end(self.socket):
            self.ended(cause)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(_LOOK_S, self.ended_after_data, cause, waited_s + _LOOK_S)

    def ended(self, cause: str, *, unreachable: bool = False) -> None:
        """The worker has ended, or nothing is known of it any more. Called once."""
        self.unreachable = unreachable
        self._cause = f"{cause}, on host '{self.host}'"
        self.fail(Unavailable(f"the worker was lost: {self._cause}"))
        if self._callback is None:  # it is being launched: ends what the thread of the launch waits for
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.output.close()
        self._ended.set()
        if self._callback is not None:
            self._callback(self._cause)


def _is_at_its_end(sock: socket.socket) -> bool:
    """Whether all that the peer has sent has come, or the socket is closed."""
    if sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


class HostConnection:
    """The connection to one agent, which is made again and again."""

    def __init__(self, address: tuple[str, int], launcher: AgentLauncher, token: bytes = b"") -> None:
        self.address = address
        self.token = token
        self.host = ""
        self.max_workers = self.others = 0
        self.workers: dict[int, RemoteProcess] = {}
        #: Why it is not connected; "" while it is.
        self.trouble = _NOT_TRIED
        self._launcher = launcher
        self._link: Link[ToServer] | None = None
        #: Where the control connection has gone to; the connections of workers go there, too.
        self.family: int = socket.AF_INET
        self.reached: Any = self.address
        self._session = b""
        self._epoch = 0
        self._next_number = 1
        self._down = asyncio.Event()
        #: Whether the agent has said that it takes workers, since it was connected to last.
        self._welcome = False

    @property
    def title(self) -> str:
        """The address, for texts."""
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def has_room(self) -> bool:
        """Whether it is connected and may start a worker."""
        return not self.trouble and (not self.max_workers or len(self.workers) + self.others < self.max_workers)

    def send(self, message: LaunchWorker | SignalWorker) -> None:
        """Send a message; nothing while it is not connected."""
        if self._link is not None:
            self._link.send(message)

    async def keep(self) -> None:
        """Connect whenever it is not connected, without end."""
        delay_s = _RETRY_S
        while True:
            await self.stay()
            if self._welcome:
                delay_s = _RETRY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MOST_RETRY_S)

    async def stay(self) -> None:
        """Connect, and return after the connection, or the attempt, has ended; `trouble` has the reason."""
        self._down.clear()
        self._welcome = False
        try:
            await self._connect()
            await self._down.wait()
        except (OSError, NotAdmitted, UnicodeError) as error:  # UnicodeError: a name that no host can have
            self._note(str(error) or type(error).__name__)

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            logger.warning("the agent at %s cannot be used: %s", self.title, trouble)
        self.trouble = trouble
        self.noted()

    def noted(self) -> None:
        """It was connected, or `trouble` has changed."""
        self._launcher.changed()

    async def _connect(self) -> None:
        self._session, self._epoch = secrets.token_bytes(16), self._epoch + 1
        sock = await in_own_thread(f"agent {self.title}", socket.create_connection, self.address, PROOF_S)
        self.family, self.reached = sock.family, sock.getpeername()
        secured = await self._secure(sock)
        proving = asyncio.ensure_future(
            in_own_thread(f"agent {self.title}", self._prove, secured, Purpose(self._session))
        )
        try:
            await asyncio.shield(proving)
            self._link = link = Link(to_server_decoder, Beat, self._take, self._lost, max_message=MAX_FROM_AGENT)
            await link.begin(secured.socket)
        except BaseException:
            _close_after(proving, secured.socket)
            raise
        limits = self._launcher.limits
        link.send(Claim(self._launcher.identity, self._epoch, PROTOCOL, limits.lines_per_s, limits.bytes_per_s))

    async def _secure(self, sock: socket.socket) -> Secured:
        """Return the connection of a connected socket. The caller gives the socket away.

        Raises `OSError`, `NotAdmitted`.
        """
        prepare_socket(sock)
        encryption = self._launcher.encryption
        return Secured(sock) if encryption is None else await encryption.secure(sock, self.address[0])

    def _prove(self, secured: Secured, purpose: Purpose) -> None:
        """Check that the peer is the agent, and prove that this is its server. Blocks.

        Raises `OSError`, `NotAdmitted`.
        """
        try:
            prove(secured.socket, self.token, purpose)
        except (OSError, NotAdmitted) as error:
            if problem := secured.problem_after(error):
                raise NotAdmitted(problem) from error
            raise

    def _take(self, message: ToServer) -> None:
        match message:
            case Welcome():
                self.host, self.max_workers, self.others = message.host, message.max_workers, message.others
                self._welcome = True
                logger.info("workers may run on host '%s' (%s)", self.host, self.title)
                self._note("")
            case Refused():
                self._note(message.text)
            case Beat():
                if message.others != self.others:
                    self.others = message.others
                    self._launcher.changed()
                for number, stopped, mark in message.workers:
                    if (worker := self.workers.get(number)) is not None:
                        worker.seen(stopped=stopped, mark=mark)
            case _ if (worker := self.workers.get(message.worker)) is not None:
                self._take_of(worker, message)

    def _take_of(self, worker: RemoteProcess, message: ToServer) -> None:
        match message:
            case Expected() if not worker.expected.done():
                worker.expected.set_result(None)
            case Waits():
                worker.pending(message.text)
            case WorkerStarted() if not worker.started.done():
                worker.started.set_result(message.folder)
            case NotStarted() if not worker.started.done():
                error = worker_error(ErrorCode(message.code), message.text)  # first: a wrong code is a ValueError
                del self.workers[worker.number]
                if message.full and self.max_workers:
                    # Another server was faster: the next heartbeat says when there is room.
                    self.others = self.max_workers - len(self.workers)
                    worker.fail(HostFull(message.text))
                else:
                    worker.fail(error)
                self.left()
            case Printed():
                worker.output.log(message.level, message.text)
            case WorkerEnded():
                del self.workers[worker.number]
                worker.ended_after_data(message.cause)
                self.left()

    def left(self) -> None:
        """A worker has ended, or could not be started."""
        self._launcher.changed()

    def _lost(self, cause: str) -> None:
        if not self.trouble or self.trouble == _NOT_TRIED:
            self._note(f"its connection was lost: {cause}")
        workers, self.workers = self.workers, {}
        self._down.set()
        for worker in workers.values():
            worker.ended(f"the host was lost ({cause})", unreachable=True)

    async def launch(self, title: str, needs: WorkerNeeds, pending: Pending) -> RemoteProcess:
        """Start a worker; there is room. Raises `OSError`, `ServingError`."""
        number, self._next_number = self._next_number, self._next_number + 1
        worker = self.workers[number] = RemoteProcess(self, number, title, self._launcher.limits)
        worker.pending = pending
        sent = False
        bringing: asyncio.Future[None] | None = None
        try:
            description = await self._launcher.description(needs)
            raw = await in_file_thread(encode_description, description)
            self.send(LaunchWorker(number, title, needs.backend, needs.version, needs.memory_limit_byte_size, raw))
            sent = True
            await worker.expected
            archive = "" if needs.environment is None else needs.environment.path

            def send(secured: Secured) -> None:
                self._prove(secured, Purpose(self._session, number))
                secured.socket.settimeout(SILENCE_S)
                send_files(secured.socket, needs.folder, description, archive)

            try:
                bringing = asyncio.ensure_future(self._bring(worker, send))
                await asyncio.shield(bringing)
            except (OSError, NotAdmitted, Unavailable) as error:
                await asyncio.wait([worker.started], timeout=_REASON_S)
                if worker.started.done():
                    await worker.started  # raises the agent's reason, which says more
                raise Unavailable(f"the files could not be brought to host '{self.host}': {error}") from error
            worker.folders[needs.folder] = await worker.started
            pending("")
        except BaseException:
            if not sent and self.workers.pop(number, None) is not None:  # the agent does not know it
                self._launcher.changed()
            worker.kill()
            if bringing is None:
                worker.socket.close()
            else:
                _close_after(bringing, worker.socket)
                bringing.add_done_callback(lambda _: worker.socket.close())  # with TLS it is another one
            raise
        return worker

    async def _bring(self, worker: RemoteProcess, send: Callable[[Secured], None]) -> None:
        """Connect a worker's socket, and let `send` bring its files. The end of the socket ends it."""
        title = f"files of {worker.title}"[:60]
        worker.socket.settimeout(PROOF_S)
        await in_own_thread(title, worker.socket.connect, self.reached)
        secured = await self._secure(worker.socket)
        worker.socket = secured.socket
        await in_own_thread(title, send, secured)

    def close(self) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.close()
        self._down.set()


def _close_after(work: asyncio.Future[None], sock: socket.socket) -> None:
    """End a socket that a thread uses, and close it after that work.

    Not before: the thread would write to whatever gets the number of the descriptor next.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

    def close(done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()  # already raised to the caller; without this line the event loop would log it
        sock.close()

    if work.done():
        close(work)
    else:
        work.add_done_callback(close)


class AgentLauncher(ServerPart):
    """Starts workers by agents. Implements `backends.launch.launcher.HostLauncher`."""

    name = "agent"

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        token: bytes = b"",
        limits: OutputLimits | None = None,
        encryption: Encryption | None = None,
    ) -> None:
        """Without `encryption` connections are not encrypted."""
        self.limits = limits or OutputLimits()
        self.encryption = encryption
        #: Of this server; agents end workers of its earlier connections.
        self.identity = secrets.token_hex(16)
        self.agents = [HostConnection(address, self, token) for address in addresses]
        self._keepers = BackgroundTasks()
        self._change = asyncio.Event()
        self._waiting = 0
        self._describing = asyncio.Lock()
        self._digests = FileDigests()

    async def start(self) -> None:
        """Begin to connect."""
        for agent in self.agents:
            self._keepers.keep(f"the connection to the agent at {agent.title}", agent.keep, _MOST_RETRY_S)

    async def close(self) -> None:
        """End the connections; agents end what is left of this server."""
        await self._keepers.close()
        for agent in self.agents:
            agent.close()
        if self.encryption is not None:
            self.encryption.close()

    def changed(self) -> None:
        """Let launches look again whether there is room."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    def check(self, needs: WorkerNeeds) -> None:
        """See `HostLauncher`."""
        if needs.gpu:
            raise Unsupported(
                f"launcher '{self.name}' starts workers of KIND_CPU only; this model has instances of KIND_GPU"
            )
        if needs.worker:
            raise Unsupported(
                f"launcher '{self.name}' starts no worker that models share (naiad.worker '{needs.worker}'): its "
                "models are on the machine of the server"
            )

    def figures(self) -> LauncherFigures:
        """See `HostLauncher`."""
        up = any(not agent.trouble for agent in self.agents)
        return LauncherFigures(self.name, up, self._waiting, self.worker_counts())

    def worker_counts(self) -> dict[str, int]:
        """Return how many workers each host has that has ever been connected with."""
        counts: dict[str, int] = {}
        for agent in self.agents:
            if agent.host:
                counts[agent.host] = counts.get(agent.host, 0) + len(agent.workers)
        return counts

    def owned(self) -> list[OwnedWorker]:
        """See `HostLauncher`."""
        return [OwnedWorker(worker.title, agent.host) for agent in self.agents for worker in agent.workers.values()]

    def capacity(self) -> list[HostCapacity]:
        """See `HostLauncher`."""
        return [
            HostCapacity(
                agent.host or agent.title, agent.trouble, len(agent.workers) + agent.others, agent.max_workers or None
            )
            for agent in self.agents
        ]

    async def description(self, needs: WorkerNeeds) -> LaunchDescription:
        """Return the description of the model's files. Raises `ServingError`.

        One at a time: instances of one model find its files in the memory of the system, and their digests here.
        """
        async with self._describing:
            return await in_file_thread(describe_launch, needs, self._digests)

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> RemoteProcess:
        """See `Launcher`. Waits until an agent has room."""
        assert not helper, "helpers share memory with the kernel"
        self.check(needs)
        while True:
            free = [agent for agent in self.agents if agent.has_room and needs.host in ("", agent.host)]
            if free:
                try:
                    return await min(free, key=lambda agent: len(agent.workers)).launch(title, needs, pending)
                except HostFull:
                    continue
            pending(self._waits_for(needs))
            self._waiting += 1
            try:
                await self._change.wait()
            finally:
                self._waiting -= 1

    def _waits_for(self, needs: WorkerNeeds) -> str:
        connected = [agent for agent in self.agents if not agent.trouble]
        wanted = [agent for agent in connected if needs.host in ("", agent.host)]
        if wanted:
            full = ", ".join(f"'{agent.host}' has {agent.max_workers} of {agent.max_workers}" for agent in wanted)
            return f"waiting for resources: room for 1 worker; host {full} (--max-workers of naiad agent)"
        troubles = "; ".join(f"{agent.title}: {agent.trouble}" for agent in self.agents if agent.trouble)
        what = f"host '{needs.host}' (naiad.host)" if needs.host else "an agent"
        names = ", ".join(f"'{agent.host}'" for agent in connected)
        return (
            f"waiting for resources: {what}"
            + (f"; connected are {names}" if names else "")
            + (f" ({troubles})" if troubles else "")
        )

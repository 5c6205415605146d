"""Starts each worker as an interpreter of its own.

A model's own environment is prepared before, once, by a process of its own (`backends/environments/`). That may take
minutes, says in the log how far it is, and is killed after a limit. A prepared environment is remembered until one of
its files changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backends.environments import messages
from backends.environments.interpreter import applied
from backends.launch.children import KernelChildren
from backends.launch.launcher import KILL_WAIT_S, not_shown
from backends.launch.local_process import LocalProcess, worker_ends
from backends.launch.output import OutputLimits
from backends.transport.zygote_messages import MARK
from kernel.errors import InternalError
from kernel.machine import own_command
from kernel.repository.execution_environment import EnvironmentSettings
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from backends.launch.launcher import Pending
    from backends.launch.local_process import ChildProcess, GivenEnds, WorkerEnds
    from backends.launch.watcher_process import SessionWatcher
    from kernel.repository.execution_environment import ExecutionEnvironment

#: What an interpreter runs that is not the server's.
_START = Path(__file__).parents[1] / "portable" / "start.py"

#: The longest response in bytes.
_MAX_RESPONSE = 1 << 20

#: How often an environment is prepared again that another server has removed meanwhile.
_ATTEMPTS = 3


class UsedEnvironment(msgspec.Struct, frozen=True):
    """What a worker is started with."""

    command: list[str]
    variables: dict[str, str]
    #: A lock that is held while the worker, or what it has started, has the descriptor. Empty without one.
    fds: list[int]


class _Remembered(msgspec.Struct, frozen=True):
    prepared: messages.EnvironmentPrepared
    #: What the system says of its files.
    signature: tuple[object, ...]


class ModelEnvironments:
    """The environments of a server's models."""

    def __init__(self, settings: EnvironmentSettings | None = None) -> None:
        self.settings = settings or EnvironmentSettings()
        self._remembered: dict[ExecutionEnvironment, _Remembered] = {}
        #: One for each environment: several instances start at the same time.
        self._locks: dict[ExecutionEnvironment, asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def use(
        self, environment: ExecutionEnvironment, title: str, launcher: SpawningLauncher, pending: Pending = not_shown
    ) -> AsyncIterator[UsedEnvironment]:
        """Prepare an environment; start the worker within the block. Lines of the log have `title`.

        `pending` gets a text while the environment is prepared, which may take minutes.

        Raises `InternalError` if there is none, with the reason.
        """
        for _ in range(_ATTEMPTS):
            async with self._locks.setdefault(environment, asyncio.Lock()):
                prepared = await self._current(environment, title, launcher, pending)
            held = await asyncio.to_thread(_held, prepared)
            if held is None:  # another server has removed it from the cache
                self._remembered.pop(environment, None)
                continue
            try:
                yield UsedEnvironment(
                    [prepared.interpreter, str(_START)], applied(prepared.variables, os.environ), held
                )
            finally:
                for fd in held:
                    os.close(fd)
            return
        raise InternalError(f"the environment '{_source(environment)}' is removed repeatedly by other servers")

    async def _current(
        self, environment: ExecutionEnvironment, title: str, launcher: SpawningLauncher, pending: Pending
    ) -> messages.EnvironmentPrepared:
        remembered = self._remembered.get(environment)
        if remembered is not None:
            signature = await asyncio.to_thread(_signature, remembered.prepared)
            if signature == remembered.signature:
                return remembered.prepared
        pending(f"its environment '{_source(environment)}' is prepared")
        prepared = await self._prepare(environment, title, launcher)
        pending("")
        self._remembered[environment] = _Remembered(prepared, await asyncio.to_thread(_signature, prepared))
        return prepared

    async def _prepare(
        self, environment: ExecutionEnvironment, title: str, launcher: SpawningLauncher
    ) -> messages.EnvironmentPrepared:
        settings, source = self.settings, _source(environment)
        request = messages.EnvironmentRequest(
            environment.path, environment.requirements, settings.cache_folder or _default_cache_folder(),
            settings.cache_byte_size,
        )  # fmt: skip
        process = launcher.start(
            title, own_command("backends.environments"), [f"--request={messages.encode(request).decode()}"]
        )
        try:
            async with asyncio.timeout(settings.timeout_s or None):
                data = await _response(process)
            await process.stop(KILL_WAIT_S)
        except TimeoutError:
            raise InternalError(
                f"the environment '{source}' was not ready within {settings.timeout_s:g} s (--environment-timeout-secs)"
            ) from None
        finally:
            process.kill()
            process.socket.close()
            await process.stop(KILL_WAIT_S)  # also of a load that is cancelled: it takes no time after the kill
        if not data:
            raise InternalError(f"the process that prepares environment '{source}' has ended; the log has the reason")
        response: messages.EnvironmentPrepared | messages.EnvironmentRefused = messages.response_decoder.decode(data)
        if isinstance(response, messages.EnvironmentRefused):
            raise InternalError(response.text)
        return response


async def _response(process: LocalProcess) -> bytes:
    """Return what the process has sent before it closed its connection."""
    loop, data = asyncio.get_running_loop(), bytearray()
    process.socket.setblocking(False)
    while len(data) < _MAX_RESPONSE and (received := await loop.sock_recv(process.socket, 1 << 16)):
        data += received
    return bytes(data)


def _source(environment: ExecutionEnvironment) -> str:
    return environment.path or environment.requirements


def _signature(prepared: messages.EnvironmentPrepared) -> tuple[object, ...]:
    """Return what changes with the files of an environment. Blocks."""
    found: list[object] = []
    for path in prepared.files:
        try:
            status = os.stat(path)
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError as error:
            found.append(error.errno)
    return tuple(found)


def _held(prepared: messages.EnvironmentPrepared) -> list[int] | None:
    """Return the locked descriptor that keeps the environment in the cache; None if it is gone. Blocks on files."""
    if not prepared.lock:
        return []
    try:
        fd = os.open(prepared.lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.stat(prepared.marker)
    except OSError:
        os.close(fd)
        return None
    return [fd]


def _default_cache_folder() -> str:
    """Return the folder of environments in the user's cache folder, or in the system's folder for temporary files."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        base = os.path.join(home, ".cache") if os.path.isabs(home) else ""
    if base:
        return os.path.join(base, "naiad", "environments")
    return os.path.join(tempfile.gettempdir(), f"naiad-environments-{os.geteuid()}")


_DEFAULT_LIMITS = OutputLimits()


class SpawningLauncher:
    """Starts workers on this machine, each as a new interpreter."""

    def __init__(
        self,
        *,
        shared_memory: bool = True,
        task_module: str = "",
        output_limits: OutputLimits = _DEFAULT_LIMITS,
        watcher: SessionWatcher | None = None,
        children: KernelChildren | None = None,
        environments: ModelEnvironments | None = None,
    ) -> None:
        """Without `shared_memory` tensors are sent over the connection, as to workers of other hosts.

        `task_module` is the module whose functions helpers run as tasks. `output_limits` are for what each worker
        prints. `watcher` ends what models have started. `children` records the workers. `environments` are those that
        models have of their own.
        """
        self.shared_memory = shared_memory
        self.output_limits = output_limits
        self.task_module = task_module
        self.watcher = watcher
        self.children = children or KernelChildren()
        self.environments = environments or ModelEnvironments()

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> LocalProcess:
        """See `Launcher`. Prepares the environment of the model first, if it has one, which may take minutes."""
        return await self.launch_between(None, title, helper=helper, needs=needs, pending=pending)

    async def launch_between(
        self, ends: GivenEnds | None, title: str, *, helper: bool = False, needs: WorkerNeeds, pending: Pending
    ) -> LocalProcess:
        """As `launch`; the worker has these `ends`, if it is one of another host's kernel."""
        launched = await self._launch(title, helper=helper, needs=needs, pending=pending, ends=ends)
        if needs.memory_limit_byte_size:
            launched.limit_memory(needs.memory_limit_byte_size)
        return launched

    async def _launch(
        self, title: str, *, helper: bool, needs: WorkerNeeds, pending: Pending, ends: GivenEnds | None
    ) -> LocalProcess:
        options = [] if self.shared_memory or helper else ["--remote"]
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": needs.visible_gpus} if needs.visible_gpus else os.environ
        if needs.environment is not None:
            async with self.environments.use(needs.environment, title, self, pending) as used:
                own = (
                    {**used.variables, "CUDA_VISIBLE_DEVICES": needs.visible_gpus}
                    if needs.visible_gpus
                    else used.variables
                )
                return self.start(title, used.command, options, own, used.fds, ends)
        if helper:
            options.append(f"--helper={self.task_module}")
        options += [f"--preload={module}" for module in needs.preload.modules]
        if needs.preload.file:
            options.append(f"--preload-file={needs.preload.file}")
        return self.start(title, own_command("backends.worker"), options, variables, given=ends)

    def start(
        self,
        title: str,
        command: Sequence[str],
        options: Sequence[str] = (),
        variables: Mapping[str, str] = os.environ,
        fds: Sequence[int] = (),
        given: GivenEnds | None = None,
    ) -> LocalProcess:
        """Start a process of ours: a program that takes the options of `backends.worker`. Raises `OSError`.

        The process has the descriptors `fds` too. See `worker_ends` for `given`.
        """
        mark = self.children.new_mark()
        with worker_ends(title, self.output_limits, given) as ends:
            fd, stdout, stderr = ends.worker_fds
            # A session of its own: only the kernel gets signals of the terminal, and the worker can be killed
            # together with the processes that its model started.
            process = subprocess.Popen(
                [*command, f"--model={title}", f"--fd={fd}", f"--kernel={os.getpid()}", *options],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[fd, *fds],
                start_new_session=True,
                env={**variables, MARK: mark},
            )
            return self.watched(process, ends, mark)

    def watched(self, process: ChildProcess, ends: WorkerEnds, mark: str) -> LocalProcess:
        """Return a worker that has just been started. Raises `OSError` if no descriptor is left to watch it."""
        try:
            launched = LocalProcess(process, ends.kernel_socket, ends.capture, self.watcher)
        except OSError:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            raise
        self.children.add(process.pid, mark)
        launched.on_ended(lambda: self.children.remove(launched.pid))
        return launched

"""What starts workers. Supervision uses only these interfaces, and does not know where and how workers are started.

`backends/launch/` has the launchers of this machine, `backends/hosts/` one for other hosts: it returns a `Launched`
over its own connection, and workers there share no memory with the kernel (`backends/supervision/remote_memory.py`).

The delay before a worker is restarted. Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import InvalidArgument
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds

if TYPE_CHECKING:
    import socket
    from collections.abc import Hashable, Mapping

    from backends.launch.output import OutputLimits, WorkerOutput

    Socket = socket.socket


#: How long to wait for the end of a killed process, in seconds.
KILL_WAIT_S = 10.0


#: Shows what a launch waits for, in the repository index, such as `its environment is prepared`; "" when it waits no
#: more.
Pending = Callable[[str], None]


def not_shown(text: str) -> None:
    """The `Pending` of launches that no repository index shows."""


class Announce(Protocol):
    """Sends a worker's process what it needs for its end of a further connection."""

    def __call__(self, fd: int | None = None, *, address: str = "", token: bytes = b"") -> None:
        """Send the descriptor of its end, which stays the caller's; or an address to connect to, and a token.

        The token is the first thing that the process sends over the connection.
        """


class Launched(Protocol):
    """A started worker. The code that launched it calls `stop` or `kill` at the end."""

    #: The kernel's end of the framed connection. The channel that uses it owns it.
    socket: Socket

    #: Logs what the worker prints, and what its messages log.
    output: WorkerOutput

    #: The name of the host that it runs on; "" for this machine.
    host: str

    #: Whether it was lost with its host, or with the connection to that: nobody knows whether it still runs.
    unreachable: bool

    def folder(self, path: str) -> str:
        """Return where the worker finds the folder of its model, which this machine has at `path`."""

    async def connect(self, announce: Announce) -> Socket:
        """Return the kernel's end of a further connection, for a model that comes to the worker's process.

        Calls `announce` once, so that the process gets its end. May wait until it has connected, but not without end.
        The channel that uses the socket owns it. Raises `OSError` or `ServingError`.
        """

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` once, with the cause, when the worker has ended for any reason."""

    @property
    def has_ended(self) -> bool:
        """Whether the worker has ended, or is lost."""

    @property
    def stopped(self) -> bool:
        """Whether the worker does not run, although it has not ended: a signal has stopped its process.

        The watchdog asks often, so it must be cheap. A launcher for other hosts has to know it without asking the
        worker, which does not respond then, nor while its model executes.
        """

    @property
    def work_mark(self) -> Hashable:
        """A value that changes while the worker's process works; None if that is not known."""

    def write_stacks(self) -> None:
        """Let a worker that has loaded its model write to its log where its threads are."""

    def terminate(self) -> None:
        """Ask the worker and the processes that it started to end (SIGTERM). `on_lost` follows if the worker does."""

    def kill(self) -> None:
        """Kill the worker. `on_lost` follows."""

    async def stop(self, grace_s: float) -> None:
        """Wait at most `grace_s` seconds until the worker has ended by itself, then kill it.

        Returns also if it cannot be killed.
        """


class Launcher(Protocol):
    """Starts workers."""

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> Launched:
        """Start a worker whose output is logged under `title`. Raises `OSError` or `ServingError`.

        A `helper` runs no model, has low priority, and always shares memory with the kernel. `needs` are those of the
        model that the worker will load. A launch may take minutes: it gives `pending` a text that says what it waits
        for, and can be cancelled.
        """


class OwnedWorker(msgspec.Struct, frozen=True):
    """A worker that a launcher has started, or is starting, for this server."""

    title: str
    host: str


class HostCapacity(msgspec.Struct, frozen=True):
    """What a host can take."""

    host: str
    #: Why no worker can be started there now, whatever room it has; "" if one can.
    trouble: str
    workers: int
    #: None for no limit.
    max_workers: int | None


class HostLauncher(Launcher, Protocol):
    """Starts workers on other hosts. `--launcher` names those that a server has."""

    def check(self, needs: WorkerNeeds) -> None:
        """Raise `Unsupported` for a model whose workers it never starts."""

    def owned(self) -> list[OwnedWorker]:
        """Return the workers that it has started for this server and that have not ended, also pending ones."""

    def capacity(self) -> list[HostCapacity]:
        """Return what each host can take now."""

    async def start(self) -> object:
        """Begin, before the first launch. Raises `ServingError` if the server cannot start."""

    async def close(self) -> object:
        """End all that it has started, after the last worker was stopped."""

    def figures(self) -> object | None:
        """As `kernel.server_parts.ServerPart.figures`."""


#: The launcher of this machine, which every server has; and the choice of it while it has room, else of another one.
LOCAL, AUTO = "local", "auto"


class LauncherSet:
    """Starts each worker by the launcher that its model names (`naiad.launcher`), else by the default one.

    Implements `Launcher`. Helpers are always on this machine: they share memory with the kernel.
    """

    def __init__(
        self,
        local: Launcher,
        others: Mapping[str, HostLauncher] | None = None,
        default: str = LOCAL,
        max_local_workers: int = 1,
    ) -> None:
        """`default` is the name of one of the launchers, or `AUTO`. That starts up to `max_local_workers` workers on
        this machine."""
        self.local = local
        self.others = dict(others or {})
        self._default = default
        self.max_local_workers = max_local_workers
        self._local_workers: list[Launched] = []
        self._starting = 0

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> Launched:
        """Raises `InvalidArgument` for a launcher that the server does not have."""
        name = LOCAL if helper else needs.launcher or self._default
        if name == AUTO:
            name = self._automatic(needs) if self.others else LOCAL
        if name == LOCAL:
            if needs.host:
                raise InvalidArgument(
                    f"'{title}' is to be on host '{needs.host}' (parameter naiad.host), but launcher 'local' starts "
                    "its workers on the machine of the server"
                )
            return await self._launch_here(title, helper=helper, needs=needs, pending=pending)
        if name not in self.others:
            names = ", ".join(f"'{each}'" for each in (LOCAL, *self.others))
            raise InvalidArgument(
                f"there is no launcher '{name}' (parameter naiad.launcher); the server has {names} (--launcher)"
            )
        return await self.others[name].launch(title, needs=needs, pending=pending)

    def _automatic(self, needs: WorkerNeeds) -> str:
        """Return the launcher for a worker that may be anywhere: local if this machine has room, else one that has."""
        if needs.gpu or needs.worker:  # they are always on this machine
            return LOCAL
        self._local_workers = [worker for worker in self._local_workers if not worker.has_ended]
        elsewhere = needs.host or needs.resources or needs.placement
        if not elsewhere and len(self._local_workers) + self._starting < self.max_local_workers:
            return LOCAL
        with_room = (name for name, other in self.others.items() if any(map(_has_room, other.capacity())))
        return next(with_room, next(iter(self.others)))

    async def _launch_here(self, title: str, *, helper: bool, needs: WorkerNeeds, pending: Pending) -> Launched:
        if helper or not self.others:
            return await self.local.launch(title, helper=helper, needs=needs, pending=pending)
        self._starting += 1
        try:
            worker = await self.local.launch(title, needs=needs, pending=pending)
        finally:
            self._starting -= 1
        self._local_workers = [*(each for each in self._local_workers if not each.has_ended), worker]
        return worker


def _has_room(host: HostCapacity) -> bool:
    return not host.trouble and (host.max_workers is None or host.workers < host.max_workers)


#: Packages add launchers with entry points of this group, see `packaged_launcher`.
ENTRY_POINT_GROUP = "naiad.launchers"


def packaged_launcher(name: str, limits: OutputLimits) -> HostLauncher:
    """Return the launcher of an installed package: its entry point names a function that takes `limits`, those of what
    each worker may print. Raises `InvalidArgument`."""
    from importlib.metadata import entry_points  # imported late: most servers do without it

    points = entry_points(group=ENTRY_POINT_GROUP)
    for point in points:
        if point.name == name:
            make: Callable[[OutputLimits], HostLauncher] = point.load()
            return make(limits)
    known = ", ".join(sorted({LOCAL, AUTO, "agent", "ray", *points.names}))
    raise InvalidArgument(
        f"--launcher: there is no launcher '{name}'; launchers are {known}. Packages add others with entry points of "
        f"the group '{ENTRY_POINT_GROUP}'"
    )


def ended_by_bus_error(cause: str) -> bool:
    """Whether a worker ended because it accessed memory that no longer existed; `cause` is that of `on_lost`."""
    return cause.startswith(describe_exit(-signal.SIGBUS))


def describe_exit(code: int) -> str:
    """Return how a process ended, as text: `killed by signal 9 (SIGKILL)` or `exit code 3`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    return f"killed by signal {-code} ({name})"


#: Delays in seconds: before the first restart, and before each next one after failed attempts in a row.
DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


class Backoff:
    """Counts workers in a row that died before they executed a batch."""

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        """A worker has executed a batch: the next restart is without delay."""
        self._failures = 0

    def next_delay_s(self) -> float:
        """Return the delay before the next attempt in seconds, and count the attempt."""
        delay = DELAYS_S[min(self._failures, len(DELAYS_S) - 1)]
        self._failures += 1
        return delay

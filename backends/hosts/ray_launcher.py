"""Starts workers where Ray has room: Ray places an agent for each worker; the rest is as with agents that run already.

Each worker has an agent of its own, so Ray accounts for what each of them needs, and sees what waits as demand for more
hosts. No tensor and no heartbeat passes Ray. All of Ray is in a process of its own, the broker: a process that uses Ray
is ended by Ray a minute after the head of the cluster is gone, and workers serve on without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from backends.hosts.encryption import Encryption
from backends.hosts.launcher import AgentLauncher, HostConnection
from backends.hosts.link import Link
from backends.hosts.messages import Beat
from backends.hosts.ray_messages import (
    BROKER_LOST_BEATS,
    Begin,
    Cluster,
    EndPlacement,
    Gone,
    NoCluster,
    Place,
    Placed,
    from_broker_decoder,
)
from backends.launch.launcher import KILL_WAIT_S, Backoff, HostCapacity, OwnedWorker, not_shown
from kernel.background import BackgroundTasks
from kernel.errors import InvalidArgument, Unavailable, Unsupported
from kernel.machine import own_command
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds
from kernel.server_parts import LauncherFigures

if TYPE_CHECKING:
    from backends.hosts.launcher import RemoteProcess
    from backends.hosts.ray_messages import ClusterNode, FromBroker
    from backends.launch.launcher import Pending
    from backends.launch.local_process import LocalProcess
    from backends.launch.output import OutputLimits
    from backends.launch.spawning import SpawningLauncher
    from kernel.options import TlsOptions

logger = logging.getLogger(__name__)

#: How often a worker is placed anew whose agent ends before it has started: Ray may place it on a host that is ending.
_ATTEMPTS = 3

#: How much of Ray's resource `node:ADDRESS`, of which each host has 1, a worker of this host takes.
_SOME_OF_NODE = 0.001

_NOT_CONNECTED = "not connected yet"


def resources_of(needs: WorkerNeeds) -> dict[str, float]:
    """Return what Ray reserves for a worker, by its own names: a CPU, if the model says nothing else. Pure."""
    found: dict[str, float] = {"CPU": 1.0}
    if needs.memory_limit_byte_size:
        found["memory"] = float(needs.memory_limit_byte_size)
    for name, amount in needs.resources:
        found[{"cpus": "CPU", "gpus": "GPU"}.get(name, name)] = amount
    if needs.host:
        found[f"node:{needs.host}"] = _SOME_OF_NODE
    return {name: amount for name, amount in found.items() if amount}


def waits_for(resources: dict[str, float], nodes: tuple[ClusterNode, ...]) -> str:
    """Return what a launch waits for, as text, and whether any host of the cluster can ever have it. Pure."""
    text = f"waiting for resources: {', '.join(_amount(*each) for each in sorted(resources.items())) or 'a host'}"
    if any(all(node.resources.get(name, 0.0) >= amount for name, amount in resources.items()) for node in nodes):
        return text
    return f"{text}; none of the {len(nodes)} hosts of the Ray cluster has that much" if nodes else text


def _amount(name: str, amount: float) -> str:
    if name.startswith("node:"):
        return f"host '{name.removeprefix('node:')}' (naiad.host)"
    return f"{amount / (1 << 20):.0f} MiB of memory" if name == "memory" else f"{amount:g} {name}"


class Placement:
    """An agent that Ray places, from the launch to its end."""

    def __init__(self, name: str, title: str, needs: WorkerNeeds, pending: Pending) -> None:
        self.name = name
        self.title = title
        self.resources = resources_of(needs)
        self.spread = needs.placement == "spread"
        self.pending = pending
        #: Done when the agent is connected with.
        self.connected: asyncio.Future[PlacedHost] = asyncio.get_running_loop().create_future()
        self.host: PlacedHost | None = None

    def request(self, launcher: RayLauncher) -> Place:
        """Return the message to the broker."""
        custom = {name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU", "memory")}
        return Place(
            self.name,
            self.resources.get("CPU", 0.0),
            self.resources.get("GPU", 0.0),
            int(self.resources.get("memory", 0)),
            custom,
            self.spread,
            launcher.lease_s,
            launcher.certificate,
        )

    def fail(self, error: InvalidArgument | Unavailable) -> None:
        """The agent is not there, or no more."""
        if not self.connected.done():
            self.connected.set_exception(error)
            self.connected.exception()  # read here: the launch may have been cancelled


class PlacedHost(HostConnection):
    """The connection to an agent that Ray has placed. It is made once, and ends with its one worker."""

    def __init__(self, placement: Placement, message: Placed, launcher: RayLauncher) -> None:
        super().__init__((message.host, message.port), launcher, message.token.encode())
        self._placement = placement

    def noted(self) -> None:
        """See `HostConnection`."""
        if not self.trouble and not self._placement.connected.done():
            self._placement.connected.set_result(self)

    def left(self) -> None:
        """See `HostConnection`."""
        self.close()


class RayLauncher(AgentLauncher):
    """Starts workers by agents that Ray places. Implements `backends.launch.launcher.HostLauncher`."""

    name = "ray"

    def __init__(
        self,
        spawning: SpawningLauncher,
        address: str = "",
        lease_s: float = 60.0,
        limits: OutputLimits | None = None,
        tls: TlsOptions | None = None,
    ) -> None:
        """`spawning` starts the broker. `address` is that of `ray.init`; "" for the cluster of this machine.

        An agent that this server does not connect with within `lease_s` seconds ends. With `tls` agents read the files
        of the same paths on their hosts. Raises `BadOption` for wrong ones here.
        """
        super().__init__((), limits=limits, encryption=None if tls is None else Encryption(tls, listens=False))
        #: As `Place.certificate`.
        self.certificate: tuple[str, str, str] | None = None
        if tls is not None:
            certificate, key, authority = (
                os.path.abspath(path or "") for path in (tls.certificate, tls.key, tls.client_ca)
            )
            self.certificate = certificate, key, authority
        self._spawning = spawning
        self._address = address
        self.lease_s = lease_s
        #: Why nothing can be placed; "" if Ray responds.
        self.trouble = _NOT_CONNECTED
        self._nodes: tuple[ClusterNode, ...] = ()
        self._placements: dict[str, Placement] = {}
        self._next = 1
        self._link: Link[FromBroker] | None = None
        self._broker: LocalProcess | None = None
        self._backoff = Backoff()
        self._uses = BackgroundTasks()

    # ---- the broker --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the broker, and again whenever it is lost."""
        self._keepers.start(self._keep_broker())

    async def close(self) -> None:
        """End all agents and the broker."""
        for placement in list(self._placements.values()):
            self._end(placement)
        await super().close()
        await self._uses.wait()
        if self._link is not None:
            self._link.close()  # the broker ends what is left, and itself
        if self._broker is not None:
            await self._broker.stop(KILL_WAIT_S)

    @property
    def broker_pid(self) -> int:
        """The process id of the broker; 0 before its first start."""
        return 0 if self._broker is None else self._broker.pid

    async def _keep_broker(self) -> None:
        while True:
            await asyncio.sleep(self._backoff.next_delay_s())
            down = asyncio.Event()
            causes: list[str] = []

            def lost(cause: str, down: asyncio.Event = down, causes: list[str] = causes) -> None:
                causes.append(cause)
                down.set()

            link = self._link = Link(from_broker_decoder, Beat, self._take, lost, BROKER_LOST_BEATS)
            try:
                broker = self._broker = self._spawning.start("ray broker", own_command("backends.hosts.ray_broker"))
                broker.on_lost(lost)
                await link.begin(broker.socket)
            except OSError as error:
                self._note(f"its broker could not be started: {error}")
                continue
            placements = list(self._placements.values())
            link.send(Begin(self._address, tuple(each.name for each in placements if each.host is not None)))
            for placement in placements:
                if placement.host is None:  # Ray has it already if the last broker has asked for it
                    link.send(placement.request(self))
            await down.wait()
            link.close()
            broker.kill()
            await broker.stop(KILL_WAIT_S)
            self._note(f"its broker was lost: {causes[0]}")

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            logger.warning("Ray places no workers: %s. Those that it has placed serve on", trouble)
        elif self.trouble and not trouble:
            logger.info("Ray places workers; its cluster has %d hosts", len(self._nodes))
        self.trouble = trouble
        for placement in self._placements.values():
            self._show(placement)

    def _show(self, placement: Placement) -> None:
        """Say in the repository index what a launch waits for."""
        if placement.host is None:
            text = waits_for(placement.resources, () if self.trouble else self._nodes)
            placement.pending(f"{text} (Ray: {self.trouble})" if self.trouble else text)

    def _take(self, message: FromBroker) -> None:
        match message:
            case Cluster():
                self._backoff.reset()
                if message.nodes != self._nodes or self.trouble:
                    self._nodes = message.nodes
                    self._note("")
            case NoCluster():
                self._note(message.text)
            case Placed():
                self._placed(message)
            case Gone() if (placement := self._placements.get(message.name)) is not None:
                kind = InvalidArgument if message.refused else Unavailable
                placement.fail(kind(f"Ray has not placed the worker of '{placement.title}': {message.text}"))
                if placement.host is None:  # else its connection says when it is lost: Ray may not reach its host
                    del self._placements[message.name]

    def _placed(self, message: Placed) -> None:
        placement = self._placements.get(message.name)
        if placement is None:
            self._send(EndPlacement(message.name))
        elif placement.host is None:  # else a new broker has found it again
            placement.host = host = PlacedHost(placement, message, self)
            self.agents.append(host)
            placement.pending(f"its agent on host '{message.host}' is connected with")
            self._uses.start(self._use(placement, host))

    async def _use(self, placement: Placement, host: PlacedHost) -> None:
        """Keep the connection to an agent until its end, which is that of the agent."""
        await host.stay()
        host.close()  # it may have been given up before it was connected with
        placement.fail(
            Unavailable(f"the agent that Ray has placed on host {host.title} cannot be reached: {host.trouble}")
        )
        self._end(placement)

    def _send(self, message: Place | EndPlacement) -> None:
        if self._link is not None:
            self._link.send(message)

    def _end(self, placement: Placement) -> None:
        """End an agent, or the wait for its place."""
        if self._placements.pop(placement.name, None) is not None:
            self._send(EndPlacement(placement.name))
        if placement.host is not None and placement.host in self.agents:
            self.agents.remove(placement.host)
            placement.host.close()

    # ---- launches ----------------------------------------------------------------------------

    def check(self, needs: WorkerNeeds) -> None:
        """See `HostLauncher`."""
        if needs.gpu:
            raise Unsupported(
                "launcher 'ray' reserves GPUs by the parameter naiad.resources (gpus=1) of models with instances of "
                "KIND_MODEL or KIND_CPU; this model has instances of KIND_GPU, which are on the server's GPUs"
            )
        super().check(needs)

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> RemoteProcess:
        """See `Launcher`. Waits until Ray has placed an agent for the worker."""
        assert not helper, "helpers share memory with the kernel"
        self.check(needs)
        for attempt in range(1, _ATTEMPTS + 1):
            placement = Placement(f"{self.identity}-{self._next}", title, needs, pending)
            self._next += 1
            self._placements[placement.name] = placement
            self._send(placement.request(self))
            self._show(placement)
            try:
                host = await placement.connected
            except Unavailable as error:
                self._end(placement)
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("%s: %s. It is placed again", title, error.message)
                continue
            except BaseException:
                self._end(placement)
                raise
            try:
                return await host.launch(title, needs, pending)
            except BaseException:
                self._end(placement)
                raise
        raise AssertionError("the last attempt returns or raises")

    def figures(self) -> LauncherFigures:
        """See `HostLauncher`."""
        pending = sum(placement.host is None for placement in self._placements.values())
        return LauncherFigures(self.name, not self.trouble, pending, self.worker_counts())

    def owned(self) -> list[OwnedWorker]:
        """See `HostLauncher`. Those that are not placed yet have no host."""
        return [
            OwnedWorker(placement.title, "" if placement.host is None else placement.host.host)
            for placement in self._placements.values()
        ]

    def capacity(self) -> list[HostCapacity]:
        """See `HostLauncher`."""
        counts: dict[str, int] = {}
        for agent in self.agents:
            counts[agent.address[0]] = counts.get(agent.address[0], 0) + 1
        # A host that is gone from the cluster may still have workers that nobody has missed yet.
        known = dict.fromkeys([*(node.host for node in self._nodes), *counts]) or {"": None}
        return [HostCapacity(host, self.trouble, counts.get(host, 0), None) for host in known]

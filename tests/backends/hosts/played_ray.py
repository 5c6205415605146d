"""A cluster of Ray, played within the test's process, and a broker that uses it in a thread.

The agents that it places are processes, as Ray's are, on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from backends.hosts.ray_actor import StartedAgent
from backends.hosts.ray_broker import Broker
from backends.hosts.ray_launcher import RayLauncher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from kernel.options import TlsOptions

HOST = "127.0.0.1"


class PlayedActor:
    """An actor, from the moment when it is asked for. `place` is its method."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.placed: Future[tuple[str, int, str]] = Future()
        self.place = PlayedMethod(self.placed)
        self.agent: StartedAgent | None = None

    @property
    def needs(self) -> dict[str, float]:
        found = {"CPU": self.options["num_cpus"], "GPU": self.options["num_gpus"], **self.options["resources"]}
        return {name: amount for name, amount in found.items() if amount}

    def fail(self, text: str) -> None:
        if not self.placed.done():
            self.placed.set_exception(RuntimeError(text))


class PlayedMethod:
    def __init__(self, result: Future[Any]) -> None:
        self._result = result

    def remote(self) -> PlayedMethod:
        return self

    def future(self) -> Future[Any]:
        return self._result


class PlayedRay:
    """What the broker uses of the package `ray`, with one host."""

    def __init__(self, **resources: float) -> None:
        self.resources = {"CPU": 4.0, f"node:{HOST}": 1.0, **resources}
        self.actors: dict[str, PlayedActor] = {}
        self.brokers = 0
        #: Raised by what the broker calls: the head of the cluster is gone.
        self.failure: Exception | None = None
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []

    def init(self, **arguments: object) -> None:
        if self.failure is not None:
            raise self.failure
        self.brokers += 1

    def shutdown(self) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        if self.failure is not None:
            raise self.failure
        gone = {"NodeManagerAddress": "10.0.0.9", "Resources": {"CPU": 64.0}, "Alive": False}
        return [{"NodeManagerAddress": HOST, "Resources": self.resources, "Alive": True}, gone]

    def remote(self, kind: type) -> PlayedRay:
        assert kind.__name__ == "AgentActor"
        return self

    def options(self, **options: Any) -> Any:
        class Made:
            @staticmethod
            def remote(lease_s: float, certificate: tuple[str, str, str] | None) -> PlayedActor:
                return self._made({**options, "lease_s": lease_s, "certificate": certificate})

        return Made

    def _made(self, options: dict[str, Any]) -> PlayedActor:
        if options["num_gpus"] > 1 and options["num_gpus"] % 1:
            raise ValueError("GPU resource quantities >1 must be whole numbers.")
        with self._lock:
            if options["name"] in self.actors:
                return self.actors[options["name"]]
            actor = self.actors[options["name"]] = PlayedActor(options)
            self._place()
            return actor

    def get_actor(self, name: str, namespace: str) -> PlayedActor:
        with self._lock:
            if name not in self.actors:
                raise ValueError(f"Failed to look up actor with name '{name}'.")
            return self.actors[name]

    def kill(self, actor: PlayedActor) -> None:
        with self._lock:
            actor.fail("The actor is dead because it was killed by `ray.kill`.")
            if actor.agent is None:
                self.actors.pop(actor.options["name"], None)
            else:
                actor.agent.end()

    def _place(self) -> None:
        """Start the actors that there is room for."""
        for actor in self.actors.values():
            used = [each.needs for each in self.actors.values() if each.agent is not None]
            if actor.agent is None and all(
                sum(each.get(name, 0.0) for each in used) + amount <= self.resources.get(name, 0.0)
                for name, amount in actor.needs.items()
            ):
                agent = actor.agent = StartedAgent(HOST, actor.options["lease_s"], actor.options["certificate"])
                thread = threading.Thread(target=self._watch, args=(actor, agent))
                self._threads.append(thread)
                thread.start()
                actor.placed.set_result((agent.host, agent.port, agent.token))

    def _watch(self, actor: PlayedActor, agent: StartedAgent) -> None:
        agent.wait()
        with self._lock:
            self.actors.pop(actor.options["name"], None)
            actor.fail("The actor died unexpectedly before finishing this task.\nits process has ended")
            self._place()

    def close(self) -> None:
        """End all actors, and wait for their ends."""
        with self._lock:
            for actor in list(self.actors.values()):
                self.kill(actor)
        self.join()

    def join(self) -> None:
        """Wait for the ends of all agents."""
        for thread in self._threads:
            thread.join()


class PlayedClient:
    """What one broker has of the cluster, until it is killed."""

    def __init__(self, cluster: PlayedRay) -> None:
        self._cluster = cluster
        self.killed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def kill(self, actor: PlayedActor) -> None:
        if not self.killed:
            self._cluster.kill(actor)


class PlayedBroker:
    """A broker in a thread. Stands for the process of one."""

    def __init__(self, cluster: PlayedRay) -> None:
        self.pid = 1
        self.socket, self._theirs = socket.socketpair()
        self._client = PlayedClient(cluster)
        self._broker = Broker(self._theirs, lambda: self._client)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._theirs:
            self._broker.run()

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Its connection says the same."""

    def kill(self) -> None:
        self._client.killed = True
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)

    async def stop(self, grace_s: float) -> None:
        while self._thread.is_alive():  # noqa: ASYNC110 - a thread says nothing to the loop
            await asyncio.sleep(0.001)


class PlayedStart:
    """Starts brokers, in place of a `SpawningLauncher`."""

    def __init__(self, cluster: PlayedRay) -> None:
        self._cluster = cluster
        self.started: list[PlayedBroker] = []

    def start(self, title: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> PlayedBroker:
        self.started.append(PlayedBroker(self._cluster))
        return self.started[-1]


@contextlib.asynccontextmanager
async def played_ray(
    cluster: PlayedRay | None = None, tls: TlsOptions | None = None
) -> AsyncIterator[tuple[RayLauncher, PlayedRay, PlayedStart]]:
    """A launcher that uses a played cluster."""
    cluster = cluster or PlayedRay()
    start = PlayedStart(cluster)
    launcher = RayLauncher(start, tls=tls)  # type: ignore[arg-type]
    await launcher.start()
    try:
        yield launcher, cluster, start
    finally:
        await launcher.close()
        await asyncio.to_thread(cluster.close)

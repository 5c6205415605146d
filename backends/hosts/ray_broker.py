"""The broker: the one process of a server that imports Ray. `python -m backends.hosts.ray_broker --fd=N`.

It lets Ray place agents, and says where they are; whether they live, their connections say. It never sees a request.
Agents are detached actors with names: they live on when it dies, and the next broker finds them again. When the server
ends, so its connection, the broker ends all agents that it knows.

The main thread reads commands and sends heartbeats; another one calls Ray, whose calls may take minutes. Ray ends a
process that has lost the head of its cluster for a minute: the launcher then starts another one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import select
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from backends.hosts.messages import BEAT_S, MAX_MESSAGE, Beat, framed
from backends.hosts.ray_actor import AgentActor
from backends.hosts.ray_messages import (
    Begin,
    Cluster,
    ClusterNode,
    EndPlacement,
    Gone,
    NoCluster,
    Place,
    Placed,
    to_broker_decoder,
)
from backends.transport.framing import FrameReader
from kernel.errors import failing_as
from kernel.texts import install_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from backends.hosts.messages import AgentMessage
    from backends.hosts.ray_messages import ToBroker

#: The namespace of the agents in Ray.
NAMESPACE = "naiad"

#: How often the cluster is looked at, and after which time without a response it counts as lost, in seconds.
LOOK_S, SILENT_S = 2.0, 10.0

#: How long to wait before Ray is connected with again, in seconds: first, and at most.
_RETRY_S, _MOST_RETRY_S = 0.5, 10.0

#: How long the broker may take to end its agents after the end of its server, in seconds.
_END_S = 10.0

#: The longest text of an error in characters.
_MAX_TEXT = 500


def placement_options(message: Place) -> dict[str, Any]:
    """Return the options of the actor for a placement. Pure."""
    return {
        "name": message.name,
        "namespace": NAMESPACE,
        "lifetime": "detached",  # it outlives the broker
        "get_if_exists": True,
        "max_restarts": 0,  # the server restarts workers, by rules of its own
        "num_cpus": message.cpus,
        "num_gpus": message.gpus,
        "memory": message.memory or None,
        "resources": dict(message.custom),
        "scheduling_strategy": "SPREAD" if message.spread else "DEFAULT",
    }


def text_of(error: BaseException | None) -> str:
    """Return the text of an error of Ray in one line: its first line, and the last one, which has the cause. Pure."""
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    found = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return found if len(found) <= _MAX_TEXT else f"{found[:_MAX_TEXT]} (shortened)"


class RayFailed(Exception):
    """A call of Ray has failed. Ray raises errors of many kinds; the message is their text in one line."""

    def __init__(self, error: Exception) -> None:
        super().__init__(text_of(error))


def _quietly(call: Callable[..., Any], *arguments: object) -> None:
    """Call Ray to end something, and ignore its errors."""
    with contextlib.suppress(Exception):
        call(*arguments)


class Broker:
    """The process, from its start to its end."""

    def __init__(self, sock: socket.socket, load: Callable[[], Any] = lambda: importlib.import_module("ray")) -> None:
        """`load` returns the package."""
        self._socket = sock
        self._load = load
        self._ray: Any = None
        self._commands: queue.Queue[ToBroker | None] = queue.Queue()
        self._sending = threading.Lock()
        self._ended = threading.Event()
        #: The actors by their names; Ray's threads remove them.
        self._actors: dict[str, Any] = {}
        #: Since when a look at the cluster has taken, by `time.monotonic`; 0 without one.
        self._looking_since = 0.0

    # ---- the main thread ---------------------------------------------------------------------

    def run(self) -> None:
        """Carry out commands until the server has ended, then end the agents."""
        caller = threading.Thread(target=self._call, daemon=True)
        caller.start()
        with contextlib.suppress(OSError):  # the server has ended
            self._read()
        self._ended.set()
        self._commands.put(None)
        caller.join(_END_S)

    def _read(self) -> None:
        reader, next_beat_s, said = FrameReader(MAX_MESSAGE), 0.0, False
        while True:
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                self._send(Beat())
                next_beat_s = now_s + BEAT_S
            silent = bool(self._looking_since) and now_s - self._looking_since > SILENT_S
            if silent and not said:
                self._send(NoCluster(f"the head of the cluster has not responded for {SILENT_S:g} s"))
            said = silent
            if not select.select([self._socket], [], [], max(0.0, next_beat_s - now_s))[0]:
                continue
            data = self._socket.recv(1 << 16)
            if not data:
                return
            for raw in reader.feed(data):
                message = to_broker_decoder.decode(raw)
                if not isinstance(message, Beat):
                    self._commands.put(message)

    def _send(self, message: AgentMessage) -> None:
        with self._sending:
            self._socket.sendall(framed(message))

    def _tell(self, message: AgentMessage) -> None:
        """Send a message, in a thread that must not end with the connection."""
        with contextlib.suppress(OSError):
            self._send(message)

    # ---- the thread that calls Ray -----------------------------------------------------------

    def _call(self) -> None:
        while not self._ended.is_set():
            try:
                message = self._commands.get(timeout=LOOK_S)
            except queue.Empty:
                if self._ray is not None:
                    self._look()
                continue
            match message:
                case Begin():
                    self._begin(message)
                case Place():
                    self._place(message)
                case EndPlacement():
                    self._end(message.name)
        for name in list(self._actors):
            self._end(name)

    def _begin(self, message: Begin) -> None:
        """Connect with the cluster, again and again, and find what there is of an earlier broker."""
        delay_s = _RETRY_S
        while not self._ended.is_set():
            try:
                self._ray = self._connected(message.address or "auto")
                break
            except ImportError as error:
                self._tell(NoCluster(f"the package ray is missing ({error}): {install_command('ray')}"))
            except RayFailed as error:
                self._tell(NoCluster(str(error)))
            self._ended.wait(delay_s)
            delay_s = min(2 * delay_s, _MOST_RETRY_S)
        if self._ray is None:
            return
        for name in message.held:
            try:
                with failing_as(RayFailed):
                    self._watch(name, self._ray.get_actor(name, NAMESPACE))
            except RayFailed as error:
                self._tell(Gone(name, str(error)))
        self._look()

    def _connected(self, address: str) -> Any:
        """Return the package, connected with the cluster. Raises `ImportError` and `RayFailed`."""
        with failing_as(RayFailed, passes=ImportError):
            ray = self._load()
            try:
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
            except BaseException:
                _quietly(ray.shutdown)
                raise
            return ray

    def _place(self, message: Place) -> None:
        if self._ray is None:
            return
        try:
            with failing_as(RayFailed):
                actor = (
                    self._ray.remote(AgentActor)
                    .options(**placement_options(message))
                    .remote(message.lease_s, message.certificate)
                )
                self._watch(message.name, actor)
        except RayFailed as error:  # Ray checks what was asked for
            refused = isinstance(error.__cause__, (TypeError, ValueError))
            self._tell(Gone(message.name, str(error), refused=refused))

    def _watch(self, name: str, actor: Any) -> None:
        """Say where an actor is once it is placed, or that it has failed before. Ray calls the function in a thread."""
        self._actors[name] = actor
        actor.place.remote().future().add_done_callback(lambda done: self._placed(name, done))

    def _placed(self, name: str, done: Future[tuple[str, int, str]]) -> None:
        error = done.exception()
        if error is None:
            self._tell(Placed(name, *done.result()))
        elif self._actors.pop(name, None) is not None:  # else the server has given it up
            self._tell(Gone(name, text_of(error)))

    def _end(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        if actor is not None:
            _quietly(self._ray.kill, actor)  # it may have ended

    def _look(self) -> None:
        """Say which hosts the cluster has."""
        self._looking_since = time.monotonic()
        try:
            with failing_as(RayFailed):
                alive = tuple(
                    ClusterNode(
                        str(node["NodeManagerAddress"]), {key: float(n) for key, n in node["Resources"].items()}
                    )
                    for node in self._ray.nodes()
                    if node["Alive"]
                )
        except RayFailed as error:
            self._tell(NoCluster(str(error)))
        else:
            self._tell(Cluster(alive))
        finally:
            self._looking_since = 0.0


def main(arguments: list[str]) -> None:
    """Serve the connection `--fd=N`. Other arguments are for those who list processes."""
    (fd,) = (int(each.removeprefix("--fd=")) for each in arguments if each.startswith("--fd="))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with socket.socket(fileno=fd) as sock:
        Broker(sock).run()
    os._exit(0)  # threads of Ray may wait for a cluster that is gone


if __name__ == "__main__":
    main(sys.argv[1:])

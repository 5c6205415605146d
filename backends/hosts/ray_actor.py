"""What Ray places: an actor that starts the agent of one worker, and ends with it.

The agent is a process of its own, as `naiad agent` is: no signal, no lock and no thread of Ray's process reaches it. It
ends with its standard input, so with the actor, and the actor ends with it. `python -m backends.hosts.ray_actor` is it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import msgspec

from backends.hosts.agent import AgentSettings, HostAgent
from backends.hosts.encryption import Encryption
from backends.hosts.files import ModelCopies, default_cache_folder
from backends.hosts.ray_messages import PlacedAgent
from kernel.machine import own_command, raise_descriptor_limit
from kernel.options import TlsOptions
from kernel.repository.execution_environment import EnvironmentSettings

logger = logging.getLogger(__name__)

#: The most bytes of all copies of models on a host.
_CACHE_BYTE_SIZE = 20 << 30


class StartedAgent:
    """The process of an agent, from its start to its end. Blocks."""

    def __init__(self, host: str, lease_s: float, certificate: tuple[str, str, str] | None = None) -> None:
        """Start it at an address of this host. Raises `RuntimeError` if it does not listen there.

        `certificate` as in `Place`.
        """
        self.host = host
        self.token = secrets.token_hex(32)
        self._process = subprocess.Popen(
            own_command("backends.hosts.ray_actor"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        settings = PlacedAgent(self.host, self.token, lease_s, certificate)
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._process.stdin.flush()
        port = self._process.stdout.readline()
        if not port:
            self._process.stdout.close()
            self.end()
            code = self._process.wait()
            raise RuntimeError(f"the agent on host '{self.host}' did not start (exit code {code}); Ray's log says why")
        self._process.stdout.close()
        self.port = int(port)

    def wait(self) -> None:
        """Wait for its end, in one thread."""
        self._process.wait()
        self.end()

    def end(self) -> None:
        """Let it end its worker and itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class AgentActor:
    """The actor. Nothing of a request comes here."""

    def __init__(self, lease_s: float, certificate: tuple[str, str, str] | None = None) -> None:
        """Start the agent; `certificate` as in `Place`. Raises `RuntimeError` if it does not start."""
        import ray  # here it is imported already

        own = ray.get_runtime_context().get_node_id()
        # Where the node says that others reach it. `ray.util.get_node_ip_address` guesses an address of the machine.
        (host,) = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
        self._agent = StartedAgent(str(host), lease_s, certificate)
        threading.Thread(target=self._end_with_agent, daemon=True).start()

    def _end_with_agent(self) -> None:
        self._agent.wait()
        os._exit(0)  # an actor that returns from a method stays

    def place(self) -> tuple[str, int, str]:
        """Return the address and the port of the agent, and its token."""
        return self._agent.host, self._agent.port, self._agent.token


async def _serve(settings: PlacedAgent, listener: socket.socket) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, read)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    agent = AgentSettings(settings.host, settings.token.encode(), 1, settings.lease_s, single=True)
    copies = ModelCopies(default_cache_folder(), _CACHE_BYTE_SIZE)
    await HostAgent(agent, copies, EnvironmentSettings(), _encryption(settings)).serve(listener, stop)


def _encryption(settings: PlacedAgent) -> Encryption | None:
    if settings.certificate is None:
        return None
    certificate, key, authority = (Path(path) for path in settings.certificate)
    return Encryption(TlsOptions(certificate, key, authority, mutual=True), listens=True)


def main() -> None:
    """Be the agent: read its settings, write its port, and serve until the worker or the actor has ended."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    # Ray's processes ignore and block signals for reasons of their own.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=PlacedAgent)
    raise_descriptor_limit()
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.create_server((settings.host, 0), family=family, backlog=128) as listener:
        os.write(1, b"%d\n" % listener.getsockname()[1])
        os.dup2(2, 1)
        anyio.run(_serve, settings, listener, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()

"""`python -m bench remote`: a worker on another host against one on this machine, over HTTP.

Four servers: with a local worker, with a local worker without shared memory, and with a worker of an agent over
loopback TCP, without and with TLS. They are loaded in turns, in another order in each round, by wrk: with one
connection for the latency, and with many for the rate and the processor time of each request. Figures are medians of
the rounds. Servers do not poll.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import trustme
from rich.console import Console
from rich.table import Table

from bench.light import LightLoad, run_load
from bench.scale import BINARY, CONFIG, MODEL, cpu_s, in_turns, request_of
from bench.server import ServerProcess, free_ports, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.light import LightRequest

LOCAL, INLINE, REMOTE, ENCRYPTED = "local", "local, no shared memory", "agent", "agent, TLS"

#: Bytes of the tensor, in and out, by name; and connections of the load for the rate.
SIZES = {"64 B": (64, 32), "16 KiB": (16 << 10, 32), "1 MiB": (1 << 20, 4), "16 MiB": (16 << 20, 2)}


class RemoteCost(msgspec.Struct, frozen=True):
    """What a request costs: in microseconds of processor time, and of waiting with one connection."""

    kernel_us: float
    worker_us: float
    #: 0 without an agent.
    agent_us: float
    #: Requests a second.
    rate: float
    p50_us: float


def median(costs: Sequence[RemoteCost]) -> RemoteCost:
    """Return the median of each figure."""
    return RemoteCost(
        *(statistics.median(getattr(each, name) for each in costs) for name in RemoteCost.__struct_fields__)
    )


class _Measured:
    """A server, and the process of its one worker."""

    def __init__(self, server: ServerProcess, parent: int) -> None:
        self.agents = [psutil.Process(parent)] if parent != server.pid else []
        self.port = server.http_port
        self.kernel = psutil.Process(server.pid)
        children = psutil.Process(parent).children(recursive=True)
        self.workers = [each for each in children if f"--model={MODEL}" in each.cmdline()]
        if len(self.workers) != 1:
            raise RuntimeError(f"the server has {len(self.workers)} workers, expected 1")

    def cost(self, request: LightRequest, connections: int, seconds: int) -> RemoteCost:
        """Load the server. Raises `RuntimeError` for a load that has failed."""
        alone = run_load(LightLoad("http", self.port, request, 1, seconds=seconds))
        groups = [self.kernel], self.workers, self.agents
        before = [cpu_s(group) for group in groups]
        many = run_load(LightLoad("http", self.port, request, connections, seconds=seconds))
        if isinstance(many, str) or isinstance(alone, str):
            raise RuntimeError(many if isinstance(many, str) else str(alone))
        kernel, worker, agent = (
            1e6 * (cpu_s(group) - start) / many.requests for group, start in zip(groups, before, strict=True)
        )
        return RemoteCost(kernel, worker, agent, many.rate, alone.p50_us)


@contextlib.contextmanager
def agent(folder: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """Run an agent with its cache and its log in `folder`; yields its process id and its port."""
    folder.mkdir(exist_ok=True)
    (port,) = free_ports(1)
    log = folder / "log"
    command = [sys.executable, "-m", "backends.hosts", f"--listen=127.0.0.1:{port}", "--host-name=far",
               f"--cache-directory={folder / 'copies'}", *flags]  # fmt: skip
    with log.open("wb") as opened:
        process = subprocess.Popen(command, stdout=opened, stderr=subprocess.STDOUT, env=dict(os.environ))
    try:
        wait_for(lambda: "listens at" in log.read_text() or process.poll() is not None)
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        yield process.pid, port
    finally:
        process.terminate()
        process.wait()


def measure(rounds: int, seconds: int, only: str = "") -> dict[str, dict[str, RemoteCost]]:
    """Return the medians, by the size and the place of the worker. Raises `RuntimeError`."""
    found: dict[str, dict[str, RemoteCost]] = {}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        (folder / "models" / MODEL / "1").mkdir(parents=True)
        (folder / "models" / MODEL / "config.pbtxt").write_text(CONFIG)
        agent_pid, port = stack.enter_context(agent(folder / "plain"))
        files = certificate_files(trustme.CA(), folder, "both")
        flags = [f"--{flag}={path}" for flag, path in files.items()]
        encrypted_pid, encrypted_port = stack.enter_context(agent(folder / "encrypted", *flags))

        def server(*flags: str, parent: int = 0) -> _Measured:
            running = stack.enter_context(ServerProcess(folder / "models", "--busy-poll-us=0", *flags))
            return _Measured(running, parent or running.pid)

        servers = {
            LOCAL: server(),
            INLINE: server("--worker-shared-memory=false"),
            REMOTE: server("--launcher=agent", f"--agents=127.0.0.1:{port}", parent=agent_pid),
            ENCRYPTED: server(
                "--launcher=agent",
                f"--agents=127.0.0.1:{encrypted_port}",
                *(f"--agent-{flag}={path}" for flag, path in files.items()),
                parent=encrypted_pid,
            ),
        }
        for name, (byte_size, connections) in SIZES.items():
            if only not in name:
                continue
            request = request_of(byte_size // 4, BINARY)
            cost = functools.partial(_Measured.cost, request=request, connections=connections)
            costs = in_turns(servers, rounds, seconds, cost)
            found[name] = {place: median(each) for place, each in costs.items()}
    return found


def certificate_files(authority: trustme.CA, folder: Path, holder: str) -> dict[str, Path]:
    """Write the files of a certificate; returns the end of their flags → file."""
    issued = authority.issue_cert("127.0.0.1")
    found = {flag: folder / f"{holder}.{flag}" for flag in ("cert-file", "key-file", "root-cert-file")}
    issued.cert_chain_pems[0].write_to_path(found["cert-file"])
    issued.private_key_pem.write_to_path(found["key-file"])
    authority.cert_pem.write_to_path(found["root-cert-file"])
    return found


def run(rounds: int, seconds: int, only: str = "") -> None:
    """Measure, and print the table."""
    table = Table("tensor", "worker", "requests/s", "kernel µs", "to local", "worker µs", "agent µs", "p50 µs, c=1")
    for name, places in measure(rounds, seconds, only).items():
        for place, cost in places.items():
            table.add_row(
                f"{name}, c={SIZES[name][1]}", place, f"{cost.rate:,.0f}", f"{cost.kernel_us:.1f}",
                f"{cost.kernel_us / places[LOCAL].kernel_us:.2f}", f"{cost.worker_us:.1f}",
                f"{cost.agent_us:.1f}", f"{cost.p50_us:,.0f}",
            )  # fmt: skip
    Console().print(table)

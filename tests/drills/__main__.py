"""`make drills`: what clients see while workers, agents, hosts, links and a cluster of Ray are killed or cut.

16 clients load a model with an instance on each of two hosts. For each fault: how many requests there were, how many
had a wrong response, none, or two, and how long the longest took. Ends with 1 if one of these is not 0, or if an error
is not one of the contract (docs/remote-workers.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trustme

from bench.server import ServerProcess, free_ports, wait_for
from tests.drills.hosts import OWN, Host, become_first_host, why_not
from tests.drills.load import CONFIG, MODEL, SOURCE, Load
from tests.drills.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST = "10.77.0.1"

CLIENTS = 16

#: How long the load lasts before a fault, and after all is well again, in seconds.
BEFORE_S, AFTER_S = 2.0, 1.0

#: How long a link is down, in seconds.
CUT_S = 20.0

#: How long it may take until all is well again, in seconds. A busy machine needs minutes for Ray.
LIMIT_S = 240.0

#: The errors of requests that were in the model of a worker that has ended by itself.
OF_WORKERS = re.compile(r"was lost")


class Row(NamedTuple):
    """What one drill has shown."""

    title: str
    requests: int
    wrong: int
    lost: int
    doubled: int
    errors: int
    #: Errors that the contract does not have.
    strange: tuple[str, ...]
    longest_s: float
    #: From the end of the fault until both instances served again, in seconds.
    back_s: float

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.lost or self.doubled or self.strange)


class Drills:
    """The drills of one server."""

    def __init__(self, server: ServerProcess, launcher: str, nodes: tuple[str, str], title: str) -> None:
        self.server, self._title = server, title
        self._workers = [f'naiad_launcher_workers{{launcher="{launcher}",node="{node}"}} 1' for node in nodes]
        self.rows: list[Row] = []
        #: Called while all is waited for to be well again.
        self.keep: Callable[[], None] | None = None

    def well(self) -> bool:
        """Whether an instance on each host serves."""
        if self.keep is not None:
            self.keep()
        page = self.server.get("/metrics", self.server.metrics_port)[1]
        if not all(line in page for line in self._workers):
            return False
        found = json.loads(self.server.get(f"/v2/models/{MODEL}/stats")[1])["model_stats"][0]
        return len(found["instance_hosts"]) == len(self._workers)

    def run(
        self, title: str, fault: Callable[[], None], allowed: re.Pattern[str] | None = None, *, noticed: str = ""
    ) -> None:
        """Let a fault happen under load, and wait until all is well again.

        `noticed` is a text that the server's log has once more when it has noticed the fault.
        """
        wait_for(self.well, LIMIT_S)
        with Load(self.server.http_port, CLIENTS) as load:
            time.sleep(BEFORE_S)
            before = self.server.log.count(noticed) if noticed else 0
            fault()
            end_s = time.monotonic()
            if noticed:
                wait_for(lambda: self.server.log.count(noticed) > before, LIMIT_S)
            wait_for(self.well, LIMIT_S)
            back_s = time.monotonic() - end_s
            time.sleep(AFTER_S)
        strange = tuple(text for text in load.errors if allowed is None or not allowed.search(text))
        row = Row(
            f"{self._title}: {title}", load.requests, load.wrong, load.lost, load.doubled, load.errors.total(),
            strange, load.longest_s, back_s,
        )  # fmt: skip
        self.rows.append(row)
        print("FAILED" if row.failed else "ok", row, flush=True)


# ---- agents ----------------------------------------------------------------------------------


class Fleet:
    """An agent on each of two hosts, with room for one worker, until `close`."""

    def __init__(self, folder: Path, host: Host, flags: list[list[str]]) -> None:
        self._folder, self._host, self._flags = folder, host, flags
        self.port = 7000
        self._ours = subprocess.Popen(
            self._command("one", FIRST, 0), stdout=(folder / "one").open("ab"), stderr=subprocess.STDOUT
        )
        self.start_second()

    def _command(self, name: str, address: str, number: int) -> list[str]:
        return [sys.executable, "-m", "backends.hosts", f"--listen={address}:{self.port}", f"--host-name={name}",
                f"--token-file={self._folder / 'token'}", f"--cache-directory={OWN / name}",
                "--max-workers=1", *self._flags[number]]  # fmt: skip

    def start_second(self) -> None:
        """Start the agent of the second host."""
        self._host.start(self._command("two", self._host.address, 1), self._folder / "two")

    def close(self) -> None:
        """End the agents."""
        self._ours.terminate()
        self._ours.wait()
        self._host.kill()


def certificates(authority: trustme.CA, folder: Path, name: str, address: str) -> list[Path]:
    """Return the files of a certificate for an address, its key and its authority."""
    issued = authority.issue_cert(address)
    found = [folder / f"{name}.pem", folder / f"{name}.key", folder / "authority.pem"]
    issued.cert_chain_pems[0].write_to_path(found[0])
    issued.private_key_pem.write_to_path(found[1])
    authority.cert_pem.write_to_path(found[2])
    return found


_FILES = ("cert-file", "key-file", "root-cert-file")


def with_agents(folder: Path, models: Path, host: Host, *, tls: bool) -> list[Row]:
    """The drills of agents that run already."""
    flags: list[list[str]] = [[], []]
    ours: list[str] = []
    if tls:
        authority = trustme.CA()
        for number, address in enumerate((FIRST, host.address)):
            files = certificates(authority, folder, f"agent{number}", address)
            flags[number] = [f"--{flag}={path}" for flag, path in zip(_FILES, files, strict=True)]
        files = certificates(authority, folder, "server", "127.0.0.1")
        ours = [f"--agent-{flag}={path}" for flag, path in zip(_FILES, files, strict=True)]
    fleet = Fleet(folder, host, flags)
    token = f"--agent-token-file={folder / 'token'}"
    addresses = f"{FIRST}:{fleet.port},{host.address}:{fleet.port}"
    rows: list[Row] = []
    try:
        with ServerProcess(models, "--launcher=agent", f"--agents={addresses}", token, *ours) as server:
            drills = Drills(server, "agent", ("one", "two"), "agents, TLS" if tls else "agents")
            _faults_of_hosts(drills, host, fleet.start_second)
            rows += drills.rows
        if tls:
            return rows
        with Relay(host.address, fleet.port) as relay:
            addresses = f"{FIRST}:{fleet.port},127.0.0.1:{relay.port}"
            with ServerProcess(models, "--launcher=agent", f"--agents={addresses}", token) as server:
                drills = Drills(server, "agent", ("one", "two"), "agents")
                drills.run("1 ms of delay each way, for 5 s", lambda: relay.delay_for(0.001, 5.0))
                drills.run("3 stalls of 1 s each", lambda: relay.stall(3, 1.0))
                rows += drills.rows
    finally:
        fleet.close()
    return rows


_LOST = "the worker of model instance"


def _faults_of_hosts(drills: Drills, host: Host, start: Callable[[], None]) -> None:
    """What can happen to the second host. `start` starts what it needs."""

    def kill_and_start(word: str, after_s: float) -> None:
        assert host.kill(word)
        time.sleep(after_s)
        start()

    def cut() -> None:
        host.cut()
        time.sleep(CUT_S)
        host.connect()

    drills.run("`kill -9` of a worker", lambda: _kill(host, f"--model={MODEL}"), OF_WORKERS, noticed=_LOST)
    agent = "backends.hosts"
    if host.processes("backends.hosts --listen"):
        drills.run("`kill -9` of the agent, back after 2 s", lambda: kill_and_start(agent, 2.0), noticed=_LOST)
    else:
        drills.run("`kill -9` of the agent", lambda: _kill(host, agent), noticed=_LOST)
    drills.run("`kill -9` of all of host 2, back after 3 s", lambda: kill_and_start("", 3.0), noticed=_LOST)
    drills.run(f"link down for {CUT_S:.0f} s", cut, noticed=_LOST)


def _kill(host: Host, word: str) -> None:
    assert host.kill(word), f"no process has '{word}'"


# ---- Ray -------------------------------------------------------------------------------------


class Cluster:
    """A cluster of Ray: its head and its state in Redis on hosts of their own, and a node on each of two others."""

    def __init__(self, folder: Path, host: Host, head: Host) -> None:
        self._folder, self._host, self._head = folder, host, head
        (folder / "ray-token").write_text("0123456789abcdef" * 4)
        (folder / "ray-token").chmod(0o600)
        (redis,) = free_ports(1)
        self.variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "ray-token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "200",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            "XDG_CACHE_HOME": str(OWN / "cache"),
        }
        self.address = f"{head.address}:6379"
        self._store = f"{FIRST}:{redis}"
        self._redis = subprocess.Popen(
            ["redis-server", "--port", str(redis), "--bind", FIRST, "--protected-mode", "no", "--save", ""],
            stdout=(folder / "redis").open("ab"), cwd=folder,
        )  # fmt: skip
        self.start_head()
        self._ours = subprocess.Popen(
            self._node(FIRST), stdout=(folder / "node1").open("ab"), stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **self.variables},
        )  # fmt: skip
        self.start_second()

    def _command(self, address: str, *words: str) -> list[str]:
        return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
                f"--node-ip-address={address}", "--min-worker-port=0", "--max-worker-port=0",
                "--object-store-memory=100000000", *words]  # fmt: skip

    def _node(self, address: str) -> list[str]:
        return self._command(address, f"--address={self.address}", "--num-cpus=1")

    def start_head(self) -> None:
        """Start the head, which runs no workers, and wait until it responds."""
        words = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={OWN / 'ray'}"]
        self._head.start(self._command(self._head.address, *words), self._folder / "head", **self.variables,
                         RAY_REDIS_ADDRESS=self._store)  # fmt: skip
        wait_for(lambda: self._listens(6379), LIMIT_S)

    def _listens(self, port: int) -> bool:
        try:
            socket.create_connection((self._head.address, port), 1).close()
        except OSError:
            return False
        return True

    def keep_second(self) -> None:
        """Start the node of the second host again if it has ended: Ray gives up a host that it cannot reach."""
        if not self._host.processes("ray.scripts"):
            self.start_second()

    def start_second(self) -> None:
        """Start the node of the second host."""
        self._host.start(self._node(self._host.address), self._folder / "node2", **self.variables)

    def lose_head(self) -> None:
        """Kill everything of the head's host; start it again after 10 s."""
        assert self._head.kill()
        time.sleep(10.0)
        # Ray looks among all processes for one that uses the address in this file, and sees those of the other hosts.
        subprocess.run([*self._head.enter, "rm", "-f", str(OWN / "ray" / "ray_current_cluster")], check=True)
        self.start_head()

    def close(self) -> None:
        """End all."""
        for host in (self._host, self._head):
            host.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._ours.pid, signal.SIGKILL)
        self._ours.wait()
        self._redis.kill()
        self._redis.wait()


def with_ray(folder: Path, models: Path, host: Host) -> list[Row]:
    """The drills of workers that Ray places."""
    head = Host(3)
    cluster = Cluster(folder, host, head)
    old = dict(os.environ)
    os.environ.update(cluster.variables)
    try:
        flags = "--launcher=ray", f"--ray-address={cluster.address}"
        with ServerProcess(models, *flags, start_timeout_s=LIMIT_S) as server:
            drills = Drills(server, "ray", (FIRST, host.address), "Ray")
            wait_for(drills.well, LIMIT_S)
            drills.keep = cluster.keep_second
            drills.run("`kill -9` of the broker", lambda: _kill_broker(server), noticed="its broker was lost")
            drills.run("head killed for 10 s, state in Redis", cluster.lose_head, noticed="Ray places workers")
            _faults_of_hosts(drills, host, cluster.start_second)
            return drills.rows
    finally:
        os.environ.clear()
        os.environ.update(old)
        cluster.close()
        head.close()


def _kill_broker(server: ServerProcess) -> None:
    for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        if b"ray_broker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)
            return
    raise AssertionError("the server has no broker")


# ---- the command -----------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ["| fault | requests | wrong | lost | doubled | errors | longest request | both serve again after |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    lines += [
        f"| {row.title} | {row.requests:,} | {row.wrong} | {row.lost} | {row.doubled} | {row.errors} "
        f"| {row.longest_s:.2f} s | {row.back_s:.1f} s |"
        for row in rows
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder that all hosts see: logs, the models, the token."""
    with tempfile.TemporaryDirectory(prefix="drills") as made:
        folder = Path(made)
        (folder / "token").write_text("0123456789abcdef" * 2)
        (folder / "token").chmod(0o600)
        version = folder / "models" / MODEL / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        (version / "model.py").write_text(SOURCE)
        yield folder


def main(arguments: list[str]) -> int:
    """Run the drills, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("--only", choices=("agents", "tls", "ray"))
    parser.add_argument("--keep-logs", metavar="FOLDER", help="copy the logs there at the end")
    chosen = parser.parse_args(arguments)
    if reason := why_not():
        print(f"skipped: this machine makes no network namespaces: {reason}")
        return 0
    become_first_host(arguments)
    rows: list[Row] = []
    with own_folder() as folder:
        host = Host(2)
        try:
            for name in ("agents", "tls"):
                if chosen.only in (None, name):
                    rows += with_agents(folder, folder / "models", host, tls=name == "tls")
            if chosen.only in (None, "ray"):
                if shutil.which("redis-server") is None:
                    print("the drills of Ray are skipped: there is no redis-server")
                else:
                    rows += with_ray(folder, folder / "models", host)
        finally:
            host.close()
            if chosen.keep_logs:
                shutil.copytree(folder, chosen.keep_logs, dirs_exist_ok=True)
    print(table(rows))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

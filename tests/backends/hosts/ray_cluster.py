"""A cluster of Ray with one host, this machine, for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench.server import free_ports, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Its address. Ray takes another one of the machine for 127.0.0.1, which others may reach.
HOST = "127.0.0.2"

_ADDRESS = re.compile(rf"--address='({HOST}:[0-9]+)'")

#: The CPUs that it says it has.
CPUS = 4

#: How long it may take to start and to end, in seconds. A busy machine needs minutes.
_START_S, _END_S = 240, 30


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of those who use the cluster that has its files in `folder`, and of itself."""
    return {
        # Ray makes tokens of its own otherwise, in the user's home.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@contextlib.contextmanager
def ray_cluster() -> Iterator[dict[str, str]]:
    """Start the cluster; yields the variables of those who use it."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # paths of sockets must be short
    (folder / "token").write_text("0123456789abcdef" * 4)
    (folder / "token").chmod(0o600)
    variables = {
        **os.environ,
        **environment(folder),
        "RAY_raylet_start_wait_time_s": "200",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    (client_port,) = free_ports(1)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
               f"--node-ip-address={HOST}", "--port=0", "--min-worker-port=0", "--max-worker-port=0",
               "--include-dashboard=false", f"--num-cpus={CPUS}", "--object-store-memory=100000000",
               f"--temp-dir={folder}"]  # fmt: skip
    if importlib.util.find_spec("grpc") is not None:  # then it has a server more, of which each machine has one
        command.append(f"--ray-client-server-port={client_port}")
    log = folder / "log"
    with log.open("wb") as opened:
        process = subprocess.Popen(
            command, stdout=opened, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
    try:
        wait_for(lambda: _ADDRESS.search(log.read_text()) is not None or process.poll() is not None, _START_S)
        address = _ADDRESS.search(log.read_text())
        assert address is not None, log.read_text()
        yield {**environment(folder), "RAY_ADDRESS": address[1]}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)

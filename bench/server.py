"""A server in its own process on free loopback ports, for measurements and for tests that need a real server."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from bench.checkout import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_STARTED = re.compile(r"Started (HTTPService|GRPCInferenceService|Metrics Service|OpenAIService) at 127\.0\.0\.1:(\d+)")

#: A server whose ports do not listen after this time hangs.
START_TIMEOUT_S = 60


class ServerFailed(Exception):
    """The server did not start; the message is its log."""


class ServerProcess:
    """`python -m kernel run` over a repository. It is ready when the `with` block begins and stopped at its end."""

    #: Flags of all servers, behind their own.
    more_flags: tuple[str, ...] = ()

    def __init__(
        self,
        repository: Path | None,
        *flags: str,
        tree: Path | None = None,
        module: str = "kernel",
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`tree` is the source tree whose server is started; by default the one that this process imports.

        `module` is run in place of `kernel`.
        """
        self._tree = tree
        self._module = module
        self._start_timeout_s = start_timeout_s
        self._flags = [f"--model-repository={repository}"] if repository is not None else []
        self._flags += (*flags, *self.more_flags)
        self.http_port = self.grpc_port = self.metrics_port = 0
        #: 0 for a server without OpenAI's API.
        self.openai_port = 0
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def log(self) -> str:
        """What the server has printed so far."""
        if self._log is None:
            return ""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def wait_for_log(self, text: str) -> None:
        """Wait until the server has printed `text`: its log is written by threads, later than a response.

        Raises `TimeoutError` with the log.
        """
        try:
            wait_for(lambda: text in self.log)
        except TimeoutError:
            raise TimeoutError(f"{text!r} is not in the log:\n{self.log}") from None

    def start(self) -> None:
        """Start the server and wait until every port listens. Raises `ServerFailed`."""
        self._log = tempfile.NamedTemporaryFile(prefix="naiad-", suffix=".log")  # noqa: SIM115 - closed in stop
        command = [sys.executable, "-m", self._module, "run", "--http-port=0", "--grpc-port=0", "--metrics-port=0",
                   "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", *self._flags]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self._tree,
            env=environment(self._tree),
            start_new_session=True,
        )
        deadline = time.monotonic() + self._start_timeout_s
        try:
            while not self._ports_found():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise ServerFailed(self.log)
                time.sleep(0.005)
        except BaseException:  # also an interrupt: nothing else would stop the process
            self.stop()
            raise

    def _ports_found(self) -> bool:
        found = dict(_STARTED.findall(self.log))
        self.http_port = int(found.get("HTTPService", 0))
        self.grpc_port = int(found.get("GRPCInferenceService", 0))
        self.metrics_port = int(found.get("Metrics Service", 0))
        self.openai_port = int(found.get("OpenAIService", 0))
        wants_openai = any(flag.startswith("--openai-port") for flag in self._flags)
        return len(found) == 3 + wants_openai

    def stop(self, timeout_s: float = 60) -> int:
        """Send SIGTERM and wait. Returns the exit code. A server that does not end in time is killed."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s)
            finally:
                if process.poll() is None:  # too slow, or the wait was interrupted
                    process.kill()
                    process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None
        return process.returncode

    def terminate(self) -> None:
        """Send SIGTERM and return at once."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 60) -> int:
        """Wait until the server has ended. Returns the exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def workers(self, model: str = "") -> dict[int, str]:
        """Return the process ids of the workers and helpers that run, with the names of their instances."""
        found: dict[int, str] = {}
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
                name = next((w.removeprefix("--model=") for w in words if w.startswith("--model=")), None)
                if name is not None and name.startswith(model):
                    found[int(child)] = name
        return found

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """Send a GET request. Returns the status and the body."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http_port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def environment(tree: Path | None) -> dict[str, str]:
    """Return the environment of a Python process that imports the packages of `tree`, and none of the working tree."""
    if tree is None:
        return dict(os.environ)
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    paths = [str(tree), *(each for each in others if Path(each).resolve() != ROOT.resolve())]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_ports(count: int) -> list[int]:
    """Return loopback ports that are not in use, for servers that cannot choose a free port themselves.

    They lie below those that the system gives to connections and to sockets without a port of their own, of which it
    could give one away before the server binds it.
    """
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    choose = random.SystemRandom()  # tests that run side by side have the same seed
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        while len(sockets) < count:
            each = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # in use
                each.bind(("127.0.0.1", choose.randrange(10_000, max(20_000, first_of_system))))
                sockets.append(each)
        return [each.getsockname()[1] for each in sockets]


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until `condition()` is true. Raises `TimeoutError`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.01)

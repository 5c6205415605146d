"""The agent of a host as a process of this machine, for tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench.server import wait_for

if TYPE_CHECKING:
    from types import TracebackType

_LISTENS = re.compile(r"listens at 127\.0\.0\.1:([0-9]+)")


class AgentProcess:
    """`python -m backends.hosts` on a free loopback port, from the beginning of the `with` block to its end."""

    def __init__(self, folder: Path, *flags: str, host: str = "far", port: int = 0) -> None:
        """`folder` gets the agent's cache and its log."""
        folder.mkdir(parents=True, exist_ok=True)
        self.host, self.port = host, port
        self.cache = folder / "copies"
        self._log = folder / "log"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> AgentProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "backends.hosts", f"--listen=127.0.0.1:{self.port}",
                   f"--host-name={self.host}", f"--cache-directory={self.cache}", *self._flags]  # fmt: skip
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_for(lambda: _LISTENS.search(self.log) is not None or self._ended())
            found = _LISTENS.search(self.log)
            assert found is not None, self.log
        except BaseException:
            self.stop()
            raise
        self.port = int(found[1])

    def _ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Send the agent a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def workers(self) -> list[int]:
        """Return the process ids of the workers that it has started."""
        assert self._process is not None
        pid, found = self._process.pid, list[int]()
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if b"--model=" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def stop(self) -> int:
        """End it as an operator does; kill it if that takes too long. Returns the exit code."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return process.returncode

    def kill(self) -> None:
        """Kill it at once, as if its host had failed."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def token_file(folder: Path) -> Path:
    """Write a token."""
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write("0123456789abcdef0123456789abcdef\n")
    return Path(file.name)

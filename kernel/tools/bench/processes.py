"""`LoadProcesses`: the load processes of one server, seen from the command. They share the load evenly."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kernel.tools.bench.messages import (
    LoadPoint,
    LoadProblem,
    LoadReady,
    MessageFrames,
    PointProgress,
    PointResult,
    StopLoad,
    framed,
    from_process,
)
from kernel.tools.client import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.tools.bench.messages import LoadSetup

_MODULE = "kernel.tools.bench.load_process"

#: Where the packages of this program are: a load process imports them from there, and not from the current folder.
_ROOT = Path(__file__).parents[3]

#: Until all processes have begun a load, and what they may take longer than a load and the timeout of its requests.
_START_DELAY_NS = 50_000_000
_GRACE_S = 20.0


class LoadShare(NamedTuple):
    """What one process does of a load."""

    connections: int
    rate: float
    phase: float


def shares(processes: int, connections: int, rate: float) -> list[LoadShare]:
    """Return the part of each process; those without a connection are left out. Pure."""
    used = min(processes, connections)
    return [
        LoadShare(connections // used + (number < connections % used), rate / used, number / used)
        for number in range(used)
    ]


class LoadProcesses:
    """Started load processes. Leave the `with` block to end them."""

    def __init__(self, setups: Sequence[LoadSetup]) -> None:
        """Start a process for each of `setups`."""
        self._timeout_s = setups[0].timeout_s
        self._frames = [MessageFrames() for _ in setups]
        self._starting = set(range(len(setups)))
        self._stopped = False
        self._results: list[PointResult] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), *_paths())))}
        try:
            for setup in setups:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", _MODULE],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        env=environment,
                        # The keyboard's interrupt is for the command alone: it ends a load and takes the results.
                        start_new_session=True,
                    )
                )
                self._send(len(self._processes) - 1, setup)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes: they end when their input does."""
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
        for process in self._processes:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def begin(self, connections: int, *, warmup_s: float, duration_s: float, rate: float, distribution: str) -> int:
        """Begin a load of all processes. Returns when its time that counts begins, of CLOCK_MONOTONIC."""
        self._wait_until_started()
        start_ns = time.monotonic_ns() + _START_DELAY_NS
        measure_ns = start_ns + round(warmup_s * 1e9)
        self._end_ns = measure_ns + round(duration_s * 1e9)
        self._stopped = False
        self._busy: dict[int, None] = {}
        self._counted: dict[int, PointProgress] = {}
        for number, share in enumerate(shares(len(self._processes), connections, rate)):
            point = LoadPoint(
                share.connections, start_ns, measure_ns, self._end_ns, share.rate, share.phase, distribution, number
            )
            self._send(number, point)
            self._busy[number] = None
        return measure_ns

    def _wait_until_started(self) -> None:
        """Wait for processes that still import what they need: their time would be missing in the first load."""
        while self._starting:
            number = min(self._starting)
            if any(isinstance(message, LoadReady) for message in self._read(number)):
                self._starting.remove(number)

    def stop(self) -> None:
        """End the load now; `collect` returns what was measured."""
        if not self._stopped:
            self._stopped = True
            self._end_ns = time.monotonic_ns()
            for number in self._busy:
                self._send(number, StopLoad())

    def collect(self, progress: Callable[[int, int], None], until_ns: int | None = None) -> list[PointResult]:
        """Wait for the results of the load, or only until a time of CLOCK_MONOTONIC; then the list may be shorter.

        `progress` is called with the successes and failures of all processes so far. Raises `ClientError`.
        """
        counted = self._counted
        with selectors.DefaultSelector() as selector:
            for number in self._busy:
                selector.register(self._output(number), selectors.EVENT_READ, number)
            results = self._results = []
            while self._busy:
                now_ns = time.monotonic_ns()
                if until_ns is not None and now_ns >= until_ns:
                    break
                if now_ns > self._end_ns + (self._timeout_s + _GRACE_S) * 1e9:
                    raise ClientError("a load process of this command does not end")
                wait_s = 0.2 if until_ns is None else min(0.2, (until_ns - now_ns) / 1e9)
                for key, _ in selector.select(wait_s):
                    for message in self._read(key.data):
                        if isinstance(message, PointProgress):
                            counted[key.data] = message
                        elif isinstance(message, LoadProblem):
                            raise ClientError(message.text)
                        else:
                            results.append(message)
                            selector.unregister(key.fileobj)
                            del self._busy[key.data]
                progress(
                    sum(each.completed for each in counted.values()), sum(each.failed for each in counted.values())
                )
        self._results = []
        return results

    def results_so_far(self) -> list[PointResult]:
        """Return what a `collect` had that an interrupt has ended."""
        found, self._results = self._results, []
        return found

    def _output(self, number: int) -> int:
        stdout = self._processes[number].stdout
        assert stdout is not None
        return stdout.fileno()

    def _send(self, number: int, message: Any) -> None:
        stdin = self._processes[number].stdin
        assert stdin is not None
        try:
            stdin.write(framed(message))
            stdin.flush()
        except BrokenPipeError:
            raise ClientError("a load process of this command has ended") from None

    def _read(self, number: int) -> list[Any]:
        data = os.read(self._output(number), 1 << 16)
        if not data:
            raise ClientError("a load process of this command has ended")
        try:
            return [from_process.decode(each) for each in self._frames[number].feed(data)]
        except msgspec.DecodeError as error:
            raise ClientError(f"a load process of this command has sent what cannot be read: {error}") from None


def _paths() -> list[str]:
    found = os.environ.get("PYTHONPATH", "")
    return found.split(os.pathsep) if found else []

"""One row on one server: attackers, a healthy client and a watch over memory, each apart from the others."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

import msgspec

from bench.checkout import ROOT
from bench.heavy.attacker import Order, Outcome
from bench.heavy.healthy import Waits
from bench.heavy.memory import MemoryGrowth, MemoryWatch
from bench.machine import cpu_times_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from bench.contenders import Contender
    from bench.heavy.attack import HeavyRow

#: How long making all bytes may take, and the healthy client's last response.
PROCESS_TIMEOUT_S = 180.0


class RowFailed(Exception):
    """A row could not be measured; the message says why."""


class RowSample(msgspec.Struct, frozen=True):
    """One round of a row on one server."""

    status: str
    #: The beginning of the different responses.
    texts: list[str]
    #: Until the response of the slowest attacker.
    seconds: float
    #: CPU time of the main process, with that of the healthy client's requests.
    cpu_s: float
    #: By protocol.
    waits: dict[str, Waits]
    growth: MemoryGrowth
    #: Requests of the attackers that the server may have at the same time.
    at_once: int
    body_byte_size: int
    response_byte_size: int

    @property
    def p99_ms(self) -> float:
        return max(each.p99_ms for each in self.waits.values())

    @property
    def longest_ms(self) -> float:
        return max(each.longest_ms for each in self.waits.values())

    @property
    def failures(self) -> list[str]:
        """What was wrong with responses to the healthy client."""
        return [text for each in self.waits.values() for text in each.failures]


class LineProcess:
    """A Python module as a process that takes and gives lines. The owner calls `close`."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name=f"lines of {module}")
        self._reader.start()

    def _read(self, output: IO[bytes]) -> None:
        for line in output:
            self._lines.put(line)
        self._lines.put(b"")

    def say(self, line: bytes = b"") -> None:
        """Give the process a line. Raises `RowFailed` if it has ended."""
        try:
            self._input.write(line + b"\n")
            self._input.flush()
        except BrokenPipeError:
            raise RowFailed("a client has ended") from None

    def line(self, timeout_s: float = PROCESS_TIMEOUT_S) -> bytes:
        """Return its next line. Raises `RowFailed` if there is none."""
        try:
            found = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise RowFailed(f"a client said nothing within {timeout_s:.0f} s") from None
        if not found:
            raise RowFailed("a client has ended")
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Attackers:
    """Processes that attack. They live for several rows; `close` ends them."""

    def __init__(self) -> None:
        self._processes: list[LineProcess] = []

    def prepare(self, row: HeavyRow, order: Order) -> list[LineProcess]:
        """Let as many as the row has make their bytes. Raises `RowFailed`."""
        while len(self._processes) < row.attackers:
            self._processes.append(LineProcess("bench.heavy.attacker"))
        chosen = self._processes[: row.attackers]
        for each in chosen:
            each.say(msgspec.json.encode(order))
        for each in chosen:
            if each.line() != b"ready\n":
                raise RowFailed("an attacker did not make its bytes")
        return chosen

    def close(self) -> None:
        processes, self._processes = self._processes, []
        for each in processes:
            each.close()

    def __enter__(self) -> Attackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def healthy_client(ports: Mapping[str, int]) -> Iterator[LineProcess]:
    """Run a healthy client of a server."""
    client = LineProcess("bench.heavy.healthy", msgspec.json.encode(dict(ports)).decode())
    try:
        client.say()
        client.say()
        client.line()  # it has responses: what comes first, such as connecting, counts in no row
        yield client
    finally:
        client.close()


def measure_row(
    row: HeavyRow, order: Order, server: Contender, attackers: Attackers, healthy: LineProcess, *, least_s: float
) -> RowSample:
    """Measure a row once, for `least_s` at least. Raises `RowFailed`."""
    chosen = attackers.prepare(row, order)
    pid, timeout_s = server.pid, order.timeout_s + PROCESS_TIMEOUT_S
    with MemoryWatch(pid) as watch:
        cpu_s = cpu_times_of(pid).total_s
        began = time.monotonic()
        healthy.say()
        for each in chosen:
            each.say()
        outcomes = [msgspec.json.decode(each.line(timeout_s), type=Outcome) for each in chosen]
        time.sleep(max(0.0, least_s - (time.monotonic() - began)))
        healthy.say()
        found = msgspec.json.decode(healthy.line(timeout_s), type=dict[str, Waits])
        cpu_s = cpu_times_of(pid).total_s - cpu_s
    return _sample(outcomes, cpu_s, found, watch.growth)


def _sample(outcomes: Sequence[Outcome], cpu_s: float, waits: dict[str, Waits], growth: MemoryGrowth) -> RowSample:
    statuses = sorted({status for each in outcomes for status in each.statuses})
    return RowSample(
        status="+".join(statuses),
        texts=[*dict.fromkeys(text for each in outcomes for text in each.texts)],
        seconds=max(each.seconds for each in outcomes),
        cpu_s=cpu_s,
        waits=waits,
        growth=growth,
        at_once=sum(each.at_once for each in outcomes),
        body_byte_size=sum(each.body_byte_size for each in outcomes),
        response_byte_size=sum(each.response_byte_size for each in outcomes),
    )

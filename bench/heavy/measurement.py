"""One row on one server: attackers, a healthy client and a watch over memory, each apart from the others.

A thread reads the memory of the server's processes from `/proc` again and again while a row runs.
"""

from __future__ import annotations

import contextlib
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from bench.checkout import ROOT
from bench.heavy.attacker import Order, Outcome
from bench.heavy.healthy import Waits
from bench.machine import children_of, cpu_times_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from bench.contenders import Contender
    from bench.heavy.attack import HeavyRow

#: The time between two readings of the main process, and how many of them there are for one of the others.
INTERVAL_S, OTHERS_EVERY = 0.01, 5

_FIELD = re.compile(r"^(RssAnon|RssShmem|VmHWM|RssFile):\s+(\d+) kB$", re.MULTILINE)


class ResidentMemory(msgspec.Struct, frozen=True):
    """Resident bytes: of its own, and of shared memory that the process has touched."""

    anonymous: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.anonymous + self.shared


class MemoryGrowth(msgspec.Struct, frozen=True):
    """How much the main process grew at most, and what helpers and workers had at most, in bytes."""

    anonymous: int
    shared: int
    #: Of both together, at the moment where it was largest. Sampling cannot miss it: Linux keeps the largest.
    total: int
    #: The largest memory of all helpers, and of all other children. Shared memory is the main process's, too.
    helpers_anonymous: int
    workers_anonymous: int


def memory_of(pid: int) -> ResidentMemory:
    """Return the memory of a process, nothing if it has ended."""
    fields = _fields(pid)
    return ResidentMemory(fields.get("RssAnon", 0), fields.get("RssShmem", 0))


def _fields(pid: int) -> dict[str, int]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        return {name: int(value) << 10 for name, value in _FIELD.findall(text)}
    return {}


class MemoryWatch:
    """Watches a main process and its children while a `with` block runs; `growth` has the result."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = ResidentMemory()
        self._file = 0
        self._anonymous = self._shared = self._helpers = self._workers = self._total = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watch")

    def __enter__(self) -> MemoryWatch:
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # sets VmHWM to what is resident now
        fields = _fields(self._pid)
        self._before = ResidentMemory(fields.get("RssAnon", 0), fields.get("RssShmem", 0))
        self._file = fields.get("RssFile", 0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        fields = _fields(self._pid)
        self._sample_main()
        # Pages of files do not grow in a row; what they grow counts, which is on the safe side.
        self._total = max(self._total, fields.get("VmHWM", 0) - self._file)

    @property
    def growth(self) -> MemoryGrowth:
        before = self._before
        return MemoryGrowth(
            max(0, self._anonymous - before.anonymous),
            max(0, self._shared - before.shared),
            max(0, self._total - before.total),
            self._helpers,
            self._workers,
        )

    def _watch(self) -> None:
        number = 0
        while not self._stop.wait(INTERVAL_S):
            self._sample_main()
            if number % OTHERS_EVERY == 0:
                self._sample_others()
            number += 1

    def _sample_main(self) -> None:
        now = memory_of(self._pid)
        self._anonymous = max(self._anonymous, now.anonymous)
        self._shared = max(self._shared, now.shared)
        self._total = max(self._total, now.total)

    def _sample_others(self) -> None:
        helpers = workers = 0
        for pid in children_of(self._pid):
            if _is_helper(pid):
                helpers += memory_of(pid).anonymous
            else:
                workers += memory_of(pid).anonymous
        self._helpers, self._workers = max(self._helpers, helpers), max(self._workers, workers)


def _is_helper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0--helper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


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
    #: CPU time of the main process, the healthy client's requests included.
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

"""`python -m bench heavy`: every row on our server and, if available, on a real Triton.

The servers start again for each row, so that no row finds memory that one before it has left. A row's rounds alternate
between the servers.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.contenders import OURS, TRITON, Contender, contenders
from bench.heavy.attack import MIB
from bench.heavy.attacker import COMPARED, Order, heavy_rows
from bench.heavy.healthy import INTERVAL_S, Waits
from bench.heavy.measurement import Attackers, RowFailed, RowSample, healthy_client, measure_row
from bench.heavy.openai_rows import write_openai_models
from bench.heavy.report import (
    GROWTH_FACTOR,
    LONGEST_LIMIT_MS,
    P99_LIMIT_MS,
    SEVERAL_P99_LIMIT_MS,
    HeavyReport,
    HeavyResult,
    judge,
    print_report,
)
from bench.machine import TRITON as TRITON_VERSION
from bench.machine import this_machine
from bench.models import write_echoes
from bench.progress import progress
from bench.server import ServerFailed
from bench.store import stem, write_json

if TYPE_CHECKING:
    from bench.heavy.attack import HeavyRow

#: Nearly the most that both servers take in one body (64 MiB over HTTP).
BODY_BYTE_SIZE = 60 * MIB
#: Our server's budget: enough for one such body, and less than twenty and thirty requests at once take.
BUDGET_BYTE_SIZE = 6 * BODY_BYTE_SIZE

#: For both servers.
FLAGS = ("--model-control-mode=explicit", "--load-model=*")
#: Without busy polling, because CPU time in which a processor would be idle is not a cost of requests.
NOT_POLLING = "--busy-poll-us=0"

#: How long attackers wait for responses, and the shortest time for which the healthy client is measured.
ATTACK_TIMEOUT_S, LEAST_S = 120.0, 1.0

#: How long the healthy client is measured without an attack.
UNDISTURBED_S = 3.0


def our_flags(budget_byte_size: int) -> list[str]:
    """Return further flags of our server, with a budget for tensors and messages."""
    return [NOT_POLLING, f"--memory-byte-size={budget_byte_size}", "--openai-port=0"]


def run(only: str, rounds: int, *, with_triton: bool, in_all_rows: bool = False) -> int:
    """Measure, print the table, and write it as JSON. Returns 1 if our server exceeds a limit in a row, else 0.

    Triton is measured in the rows `COMPARED`, or `in_all_rows`.
    """
    machine = this_machine()
    rows = [row for row in heavy_rows() if only in row.name]
    with tempfile.TemporaryDirectory(prefix="naiad-bench-") as temporary, Attackers() as attackers:
        ours, theirs = Path(temporary, "ours"), Path(temporary, "theirs") if with_triton else None
        write_echoes(ours, builtin=True)
        write_openai_models(ours)
        if theirs is not None:
            write_echoes(theirs, builtin=False)
        all_rows = frozenset(row.name for row in rows if row.protocol != "openai")
        compared = all_rows if in_all_rows else COMPARED
        measurement = _Measurement(ours, theirs, attackers, rounds, compared)
        undisturbed = measurement.undisturbed()
        results: list[HeavyResult] = []
        with progress() as shown:
            bar = shown.add_task("starting", total=len(rows))
            for row in rows:
                shown.update(bar, description=row.name)
                results.append(measurement.result(row))
                shown.advance(bar)
    report = HeavyReport(
        machine=machine,
        rounds=rounds,
        body_byte_size=BODY_BYTE_SIZE,
        healthy_rate=1 / INTERVAL_S,
        our_flags=[*FLAGS, *our_flags(BUDGET_BYTE_SIZE)],
        triton=TRITON_VERSION if TRITON in undisturbed else "",
        undisturbed_ms=undisturbed,
        results=results,
        limits={
            "p99_ms": P99_LIMIT_MS,
            "p99_ms_of_several": SEVERAL_P99_LIMIT_MS,
            "longest_ms": LONGEST_LIMIT_MS,
            "growth_of_body": GROWTH_FACTOR,
        },
    )
    print_report(report)
    # A part of the rows is a look; bench/results has complete runs.
    path = stem("heavy", quick=bool(only)).with_suffix(".json")
    write_json(path, report)
    print(f"wrote {path}")
    return int(any(result.wrong for result in results))


class _Measurement:
    """Runs rows on servers over two repositories. Without Triton after it was not available once."""

    def __init__(
        self, ours: Path, theirs: Path | None, attackers: Attackers, rounds: int, compared: frozenset[str]
    ) -> None:
        self._ours = ours
        self._theirs = theirs
        self._attackers = attackers
        self._rounds = rounds
        self._compared = compared

    def undisturbed(self) -> dict[str, tuple[float, float]]:
        """Return p99 and longest wait of the healthy client without an attack, in milliseconds, by server."""
        found: dict[str, tuple[float, float]] = {}
        with contenders(self._ours, self._theirs, *FLAGS, our_flags=our_flags(BUDGET_BYTE_SIZE)) as servers:
            if len(servers) == 1:
                self._theirs = None
            for server in servers:
                with healthy_client(server.ports) as healthy:
                    healthy.say()
                    time.sleep(UNDISTURBED_S)
                    healthy.say()
                    waits = msgspec.json.decode(healthy.line(), type=dict[str, Waits]).values()
                    found[server.name] = max(w.p99_ms for w in waits), max(w.longest_ms for w in waits)
        return found

    def result(self, row: HeavyRow) -> HeavyResult:
        """Measure a row on all servers."""
        samples: dict[str, list[RowSample]] = {}
        failures: dict[str, str] = {}
        theirs = self._theirs if row.name in self._compared else None
        try:
            with contenders(self._ours, theirs, *FLAGS, our_flags=our_flags(BUDGET_BYTE_SIZE)) as servers:
                for server in servers * self._rounds:
                    if server.name not in failures:
                        self._measure(row, server, samples, failures)
        except ServerFailed as error:
            failures[OURS] = f"the server did not start: {error}"
        measured = samples.get(OURS)
        return HeavyResult(row.name, samples, failures, judge(row, BUDGET_BYTE_SIZE, measured) if measured else None)

    def _measure(
        self, row: HeavyRow, server: Contender, samples: dict[str, list[RowSample]], failures: dict[str, str]
    ) -> None:
        try:
            with healthy_client(server.ports) as healthy:
                order = Order(row.name, BODY_BYTE_SIZE, server.port_of(row.protocol), ATTACK_TIMEOUT_S)
                sample = measure_row(row, order, server, self._attackers, healthy, least_s=LEAST_S)
                samples.setdefault(server.name, []).append(sample)
        except RowFailed as error:
            failures[server.name] = str(error)
            self._attackers.close()  # one of them may be in the middle of this row

"""One heavy request stops nobody: the rows of `python -m bench heavy` with smaller bodies, from other processes.

Nothing here depends on how busy the machine is: what counts is the processor time of callbacks on the kernel's event
loop and of the whole kernel, its memory, and that a healthy client gets each of its responses.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from bench.contenders import OURS, contender
from bench.heavy.attack import MIB
from bench.heavy.attacker import Order, heavy_rows
from bench.heavy.command import FLAGS, our_flags
from bench.heavy.measurement import Attackers, LineProcess, RowSample, healthy_client, measure_row
from bench.heavy.openai_rows import write_openai_models
from bench.heavy.report import growth_limit
from bench.models import write_echoes
from bench.server import ServerProcess
from tests.end_to_end.heavy_sizes import BUDGET_BYTE_SIZE, LARGER, LARGEST, LEFT_OUT, byte_size
from tests.watched_server import HELD_UP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.heavy.attack import HeavyRow

pytestmark = pytest.mark.slow

#: What the kernel may compute for a row, for each request of the healthy client meanwhile, for each byte that it
#: receives or sends, for each request of JSON of medium size, which it may decode and encode itself, and for each
#: chunk.
ROW_CPU_S, HEALTHY_CPU_S, BYTE_CPU_S, MEDIUM_CPU_S, CHUNK_CPU_S = 0.15, 0.0005, 0.004 / MIB, 0.002, 8e-6


class Attacked:
    """A server, its healthy client, and attackers."""

    def __init__(self, server: ServerProcess, attackers: Attackers, healthy: LineProcess) -> None:
        self._server = server
        self._contender = contender(OURS, server)
        self._attackers = attackers
        self._healthy = healthy
        self._read = 0

    def measure(self, row: HeavyRow) -> RowSample:
        self.held_up()
        size = byte_size(row.name, exceeds_budget=row.exceeds_budget)
        order = Order(row.name, size, self._contender.port_of(row.protocol), timeout_s=40, hold_s=0.2)
        return measure_row(row, order, self._contender, self._attackers, self._healthy, least_s=0)

    def held_up(self) -> list[str]:
        """Return what has held the kernel's event loop up since the last call."""
        log = self._server.log
        lines = log[self._read :].splitlines()
        self._read = len(log)
        return [line for line in lines if line.startswith(HELD_UP)]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    models = tmp_path_factory.mktemp("models")
    write_echoes(models, builtin=True)
    write_openai_models(models)
    flags = [*FLAGS, *our_flags(BUDGET_BYTE_SIZE)]
    with (
        ServerProcess(models, *flags, module="tests.watched_server") as server,
        Attackers() as attackers,
        healthy_client(contender(OURS, server).ports) as healthy,
    ):
        yield Attacked(server, attackers, healthy)


def test_each_row_that_is_named_exists() -> None:
    assert (LARGER | LARGEST | LEFT_OUT) - {row.name for row in heavy_rows()} == set()


ROWS = [row for row in heavy_rows() if row.name not in LEFT_OUT]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_heavy_request_stops_nobody(attacked: Attacked, row: HeavyRow) -> None:
    sample = attacked.measure(row)
    assert row.accepts(sample.status), f"{sample.status}, expected {row.status}: {sample.texts}"
    assert re.search(row.text, "\n".join(sample.texts)), f"{row.text!r} is not in {sample.texts}"
    assert sample.failures == []
    assert attacked.held_up() == []
    healthy_requests = sum(each.requests for each in sample.waits.values())
    transferred = sample.body_byte_size + sample.response_byte_size
    is_medium = row.name.startswith("http medium")
    medium_requests = sample.at_once * len(row.build(1 << 20).requests) if is_medium else 0
    chunks = sample.body_byte_size if "chunks of 1 byte" in row.name else 0
    assert sample.cpu_s <= (
        ROW_CPU_S
        + HEALTHY_CPU_S * healthy_requests
        + BYTE_CPU_S * transferred
        + MEDIUM_CPU_S * medium_requests
        + CHUNK_CPU_S * chunks
    )
    assert sample.growth.total <= growth_limit(row, BUDGET_BYTE_SIZE, sample)

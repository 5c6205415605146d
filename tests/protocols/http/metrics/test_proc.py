"""Processor time and memory of processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from protocols.http.metrics import proc
from protocols.http.metrics.proc import (
    HostLoad,
    HostTimes,
    Memory,
    ProcessLoads,
    busy_share,
    cpu_seconds,
    parse_cpu_times,
    parse_memory,
    read_process,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_idle_and_waiting_time_is_not_busy() -> None:
    times = parse_cpu_times("cpu  10 20 30 400 50 6 7 8 9 9\ncpu0 1 2 3\n")
    assert times == HostTimes(total=531, idle=450)


def test_the_busy_share_is_that_of_the_time_between() -> None:
    assert busy_share(HostTimes(100, 50), HostTimes(200, 125)) == 0.25
    assert busy_share(HostTimes(100, 50), HostTimes(100, 50)) == 0.0


def test_a_share_stays_a_share_when_the_system_corrects_its_counters() -> None:
    assert busy_share(HostTimes(100, 50), HostTimes(200, 49)) == 1.0
    assert busy_share(HostTimes(100, 50), HostTimes(200, 151)) == 0.0


def test_memory_is_counted_in_bytes() -> None:
    assert parse_memory("MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable:  2 kB\n") == Memory(8192, 2048)


def test_this_machine_can_be_asked() -> None:
    load = HostLoad(interval_ms=0, now_ns=0)
    assert 0.0 <= load.utilization(now_ns=1) <= 1.0
    memory = load.memory()
    assert 0 < memory.available <= memory.total


def test_within_an_interval_the_figure_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(proc, "STAT_FILE", stat)

    def ticks(busy: int, idle: int) -> None:
        stat.write_text(f"cpu {busy} 0 0 {idle} 0 0 0 0\n")

    ticks(0, 0)
    load = HostLoad(interval_ms=2, now_ns=0)
    ticks(50, 50)
    assert load.utilization(1_999_999) == 0.0
    assert load.utilization(2_000_000) == 0.5
    ticks(150, 50)
    assert load.utilization(3_999_999) == 0.5
    assert load.utilization(4_000_000) == 1.0


def test_the_name_of_a_process_may_contain_anything() -> None:
    fields = " ".join(["S", *["0"] * 10, str(3 * os.sysconf("SC_CLK_TCK")), str(os.sysconf("SC_CLK_TCK")), "0"])
    assert cpu_seconds(f"17 (a) b (c 1 2) {fields}") == 4.0


def test_a_process_is_busy_from_its_second_look_on() -> None:
    loads = ProcessLoads()
    loads.look([os.getpid(), 2**22 + 1])
    busy, byte_size = loads.found[os.getpid()]
    assert busy is None
    assert byte_size > 1 << 20
    assert set(loads.found) == {os.getpid()}, "a process that does not exist was found"
    loads.look([os.getpid()])
    busy, _ = loads.found[os.getpid()]
    assert busy is not None
    assert busy >= 0
    loads.look([])
    assert loads.found == {}


def test_a_process_that_has_ended_has_no_figures() -> None:
    assert read_process(2**22 + 1) is None

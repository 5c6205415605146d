"""Processor time and memory of processes."""

from __future__ import annotations

import os

from protocols.http.dashboard.processes import ProcessLoads, cpu_seconds, read_process


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

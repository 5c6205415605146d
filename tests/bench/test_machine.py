"""Whether a machine is busy is measured by its processors at that moment."""

from __future__ import annotations

import os
import time

import msgspec
import pytest

from bench import machine
from tests.bench.conftest import MACHINE


@pytest.mark.parametrize(("idle_seconds", "in_use"), [(2.0, 0.0), (2.01, 0.0), (0.5, 1.5), (0.0, 2.0)])
def test_processors_in_use_are_those_that_were_not_idle(
    idle_seconds: float, in_use: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([1000.0, 1000.0 + idle_seconds])
    monkeypatch.setattr(machine, "_idle_seconds", lambda: next(seconds))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert machine.this_machine().load == in_use


def test_a_line_about_a_machine_mentions_load_only_if_it_was_busy() -> None:
    assert "busy" not in MACHINE.line
    assert msgspec.structs.replace(MACHINE, load=1.5).line.endswith("busy with other things (1.5 processors in use)")

"""Tests of `LoadProcesses`; `test_bench_command.py` tests them with a server."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from kernel.tools.bench.messages import LoadSetup
from kernel.tools.bench.processes import LoadProcesses

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

#: A module of a protocol that takes long to import.
SLOW = """
import time
from pathlib import Path

from protocols.clients.http_load import connect, sequence_id_bytes

time.sleep(0.7)
Path(__file__).with_name("imported").write_text(str(time.monotonic_ns()))
"""


def test_a_load_begins_when_all_processes_have_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_protocol.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    setup = LoadSetup("slow_protocol", "127.0.0.1", 1, b"", False, False, [[[b""]]], 0, 1, 1.0)
    with closing(LoadProcesses([setup])) as processes:
        measure_ns = processes.begin(1, warmup_s=0.0, duration_s=0.1, rate=0.0, distribution="constant")
        assert measure_ns > int((tmp_path / "imported").read_text())

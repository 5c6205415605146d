"""The loads of the curve: every transport at every size that makes sense, with the arguments of perf_analyzer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bench import curve, store

if TYPE_CHECKING:
    from pathlib import Path

LOADS = {load.name: load for load in curve.loads(curve.SIZES)}


def test_sizes_go_from_1_kib_to_64_mib() -> None:
    assert [curve.size_name(size) for size in curve.SIZES] == [
        "1 KiB", "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB",
    ]  # fmt: skip


def test_json_ends_where_it_takes_seconds() -> None:
    assert "JSON 1 MiB c=4" in LOADS
    assert "JSON 4 MiB c=1" not in LOADS
    assert "gRPC 64 MiB c=4" in LOADS


def test_the_client_gets_arguments_for_shared_memory(tmp_path: Path) -> None:
    row = LOADS["shared memory 4 KiB c=4"].row(tmp_path)
    assert (row.protocol, row.concurrency) == ("grpc", 4)
    assert row.extra == ("--shape", "INPUT0:1024", "--shared-memory", "system", "--output-shared-memory-size", "4096")


def test_json_requests_carry_numbers_that_are_the_same_in_every_run(tmp_path: Path) -> None:
    row = LOADS["JSON 1 KiB c=1"].row(tmp_path)
    path = tmp_path / "numbers-256.json"
    assert str(path) in row.extra
    (entry,) = json.loads(path.read_text())["data"]
    numbers = entry["INPUT0"]["content"]
    assert entry["INPUT0"]["shape"] == [len(numbers)] == [256]
    assert all(-1 <= number <= 1 for number in numbers)
    path.unlink()
    LOADS["JSON 1 KiB c=1"].row(tmp_path)
    assert json.loads(path.read_text())["data"] == [entry]


@pytest.mark.parametrize("name", ["gRPC", "HTTP, binary", "shared memory", "JSON"])
def test_larger_requests_have_longer_windows(name: str) -> None:
    windows = [load.window_s for load in curve.loads(curve.SIZES) if load.transport.name == name and load.clients == 4]
    assert windows == sorted(windows)
    assert windows[0] < windows[-1]


def test_a_stored_curve_is_read_again(tmp_path: Path, stored_curve: curve.Curve) -> None:
    store.write_json(tmp_path / "curve.json", stored_curve)
    assert store.read_json(tmp_path / "curve.json", curve.Curve) == stored_curve


def test_the_table_has_every_size(stored_curve: curve.Curve, capsys: pytest.CaptureFixture[str]) -> None:
    curve.print_table(stored_curve)
    assert capsys.readouterr().out.count(" 64 MiB ") == 3

"""What many models cost: figures are added up, compared and printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench import store
from bench.contenders import OURS, TRITON
from bench.density import (
    KINDS,
    QUICK_COUNTS,
    Density,
    DensityPoint,
    Footprint,
    ModelKind,
    Restarts,
    measure_restarts,
    mib,
    model_name,
    print_table,
    ratios,
    write_copies,
)
from bench.load import ADD_SUB
from bench.machine import ProcessMemory

if TYPE_CHECKING:
    from pathlib import Path


def test_a_footprint_is_the_median_of_workers_and_the_sum_of_all_processes() -> None:
    memories = {
        1: ProcessMemory(50, 45, 40),
        2: ProcessMemory(9, 8, 7),
        3: ProcessMemory(9, 6, 3),
        4: ProcessMemory(1, 1, 1),
    }
    found = Footprint.of(1, [2, 3, 99], memories)
    assert found.main == ProcessMemory(50, 45, 40)
    assert (found.worker_count, found.worker_private, found.worker_proportional) == (2, 5, 7)
    assert found.together == ProcessMemory(69, 60, 51)


def test_a_server_without_workers_has_no_medians() -> None:
    found = Footprint.of(1, [], {1: ProcessMemory(5, 4, 3)})
    assert (found.worker_count, found.worker_private, found.worker_proportional) == (0, 0, 0)


def test_ours_is_compared_with_triton_where_both_have_a_point() -> None:
    def point(server: str, models: int, ready_s: float, byte_size: int) -> DensityPoint:
        memory = ProcessMemory(byte_size, byte_size, byte_size)
        return DensityPoint("python", server, models, ready_s, Footprint(memory, 1, 0, 0, memory), {})

    points = [point(OURS, 10, 1.0, 300), point(TRITON, 10, 4.0, 1000), point(OURS, 40, 2.0, 300)]
    assert ratios(points) == ["10 x python: ready in 0.25 of Triton's time, with 0.30 of its memory"]


def test_medians_of_restarts() -> None:
    restarts = Restarts([30.0, 20.0, 900.0], [3.0, 2.0, 90.0])
    assert (restarts.median_ms, restarts.median_load_ms) == (30.0, 3.0)


def test_figures_are_printed_with_what_was_left_out(
    stored_density: Density, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_table(stored_density)
    printed = capsys.readouterr().out
    assert "40 x Python add_sub" in printed
    assert "restart of a killed worker: 30.0 ms until the next response" in printed
    assert "left out: Python with torch: torch is not installed" in printed


def test_stored_figures_are_read_again(stored_density: Density, tmp_path: Path) -> None:
    path = tmp_path / "density.json"
    store.write_json(path, stored_density)
    assert store.read_json(path, Density) == stored_density


def test_a_size_is_shown_in_mebibytes() -> None:
    assert [mib(0), mib(3 << 19)] == ["", "1.5 MiB"]


def test_copies_have_names_of_their_own(tmp_path: Path) -> None:
    names = write_copies(tmp_path, KINDS[0], max(QUICK_COUNTS))
    assert names[:2] == [model_name(0), model_name(1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / names[-1] / "1" / "model.py").is_file()


def test_the_inputs_of_a_kind_are_those_of_its_configuration(tmp_path: Path) -> None:
    for kind in KINDS:
        kind.write(tmp_path / kind.name)
        config = (tmp_path / kind.name / "config.pbtxt").read_text()
        assert all(f'"{name}"' in config for name in kind.inputs.names), kind.name


def test_a_kind_whose_package_is_not_installed_says_so() -> None:
    kind = ModelKind("x", "A model", lambda folder: None, ADD_SUB, triton=True, needs="no_such_package")
    assert kind.missing() == "A model: no_such_package is not installed"
    assert KINDS[0].missing() == ""


@pytest.mark.slow
def test_a_killed_worker_is_away_for_longer_than_its_model_loads(tmp_path: Path) -> None:
    restarts = measure_restarts(tmp_path, 2)
    assert len(restarts.total_ms) == len(restarts.load_ms) == 2
    assert all(total > load > 0 for total, load in zip(restarts.total_ms, restarts.load_ms, strict=True))

"""Results are written completely or not at all. A run replaces figures of its rows; a ratio names another machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from bench import store
from bench.store import Kept, KeptFigures, KeptRatio, kept_line, read_kept
from tests.bench.conftest import MACHINE

if TYPE_CHECKING:
    from pathlib import Path


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    store.write(path, b"old")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        store.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_made_with_the_first_result(tmp_path: Path) -> None:
    store.write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert (tmp_path / "a" / "b.json").read_text() == '{\n "x": 1\n}\n'


def test_a_quick_run_does_not_touch_what_is_published() -> None:
    assert store.stem("curve", quick=True).parent != store.stem("curve", quick=False).parent == store.PUBLISHED


FIGURES = KeptFigures(1000.0, 2000.0, 30.0, 9)

OTHER_MACHINE = msgspec.structs.replace(MACHINE, processor="Another Processor", commit="def5678")


def test_a_run_of_some_rows_replaces_only_theirs() -> None:
    kept = Kept().with_rows({"a": FIGURES, "b": FIGURES}, MACHINE)
    kept = kept.with_rows({"b": KeptFigures(3.0, 2.0, 1.0, 6)}, OTHER_MACHINE)
    assert (kept.rows["a"].figures, kept.rows["a"].commit) == (FIGURES, MACHINE.commit)
    assert (kept.rows["b"].figures.rate, kept.rows["b"].commit) == (3.0, "def5678")


def test_a_ratio_to_the_figures_of_another_machine_is_marked() -> None:
    kept = Kept().with_rows({"a": FIGURES}, MACHINE)
    assert str(kept.ratio("a", 900.0, MACHINE)) == "0.90"
    assert str(kept.ratio("a", 900.0, OTHER_MACHINE)) == "0.90?"
    assert kept.ratio("b", 900.0, MACHINE) is None


def test_one_line_says_how_all_rows_stand_to_the_kept_ones() -> None:
    line = kept_line({"a": KeptRatio(0.5, True), "b": KeptRatio(2.0, True)})
    assert "geometric mean 1.00 (a factor of 2.00 around it), lowest 0.50 in a" in line
    assert "hint" not in line
    assert kept_line({"a": KeptRatio(0.5, False)}).endswith("a hint only")
    assert kept_line({}) == ""


def test_kept_figures_are_read_again_and_missing_ones_are_none(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    assert read_kept(path) == Kept()
    kept = Kept().with_rows({"a": FIGURES}, MACHINE)
    store.write_json(path, kept)
    assert read_kept(path) == kept

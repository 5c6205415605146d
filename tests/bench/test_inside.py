"""A whole request is measured inside the kernel process, also that of another source tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import inside
from bench.inside import PATHS, measure_apart

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_every_path_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "WARM_UP", 2)
    monkeypatch.setattr(inside, "ROUNDS", 2)
    measured = inside.measure()
    assert tuple(measured) == PATHS
    assert all(microseconds > 0 for microseconds in measured.values())


def test_a_tree_is_measured_by_its_own_code(tmp_path: Path) -> None:
    assert measure_apart(tmp_path) == {}
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "bench" / "inside.py").write_text("def measure():\n    return {'a path': 12.5}\n")
    assert measure_apart(tmp_path) == {"a path": 12.5}

"""Pictures are drawn only from stored numbers, and equal numbers give equal files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("matplotlib", reason="pictures need the dependency group `bench`")

from bench.pictures import draw_curve, draw_density, draw_growth, save
from bench.pictures.style import apart

if TYPE_CHECKING:
    from pathlib import Path

    from bench.curve import Curve
    from bench.density import Density
    from bench.growth import Growth

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_curve_becomes_two_files(tmp_path: Path, stored_curve: Curve) -> None:
    png, svg = save(draw_curve(stored_curve), tmp_path / "curve")
    assert (png.name, svg.name) == ("curve.png", "curve.svg")
    assert png.read_bytes().startswith(PNG)
    assert b"<svg" in svg.read_bytes()


def test_a_growth_becomes_two_files(tmp_path: Path, stored_growth: Growth) -> None:
    png, svg = save(draw_growth(stored_growth), tmp_path / "growth")
    assert png.read_bytes().startswith(PNG)
    assert b"<svg" in svg.read_bytes()


def test_a_density_becomes_two_files(tmp_path: Path, stored_density: Density) -> None:
    png, svg = save(draw_density(stored_density), tmp_path / "density")
    assert png.read_bytes().startswith(PNG)
    assert b"<svg" in svg.read_bytes()


def test_drawing_again_changes_nothing(tmp_path: Path, stored_curve: Curve) -> None:
    first, second = (save(draw_curve(stored_curve), tmp_path / name) for name in ("first", "second"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([], []),
        ([0, 100], [0, 100]),
        ([50, 50], [45, 55]),
        ([52, 50], [56, 46]),
        ([0, 1, 2], [-9, 1, 11]),
        ([0, 12, 14], [0, 10, 20]),
        ([0, 30, 31, 90], [0, 25.5, 35.5, 90]),
    ],
)
def test_labels_do_not_overlap_and_are_near_their_lines(wanted: list[float], placed: list[float]) -> None:
    assert apart(wanted, 10) == pytest.approx(placed, abs=2)
    assert all(abs(a - b) >= 9.99 for i, a in enumerate(apart(wanted, 10)) for b in apart(wanted, 10)[:i])

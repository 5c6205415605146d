"""The pictures of the documents, drawn only from stored numbers. Needs matplotlib (dependency group `bench`)."""

from __future__ import annotations

from bench.pictures.curve import draw_curve
from bench.pictures.density import draw_density
from bench.pictures.growth import draw_growth
from bench.pictures.peers import draw_peers
from bench.pictures.style import save

__all__ = ["draw_curve", "draw_density", "draw_growth", "draw_peers", "save"]

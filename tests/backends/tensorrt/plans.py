"""Engines for tests."""

from __future__ import annotations

from typing import Any

from tests.fake_tensorrt.plan import PlanFile, PlanTensor


def tensor(name: str, shape: list[int], dtype: str = "FLOAT", *, output: bool = False, **more: Any) -> PlanTensor:
    return PlanTensor(name, not output, dtype, shape, **more)


def add_sub_plan(width: int = 4, most: int = 8, **more: Any) -> PlanFile:
    """Return an engine of up to `most` rows: X = A + B, Y = A - B."""
    shape = [-1, width]
    extent = [[1, width], [max(1, most // 2), width], [most, width]]
    more.setdefault("profiles", [{"A": extent, "B": extent}])
    tensors = [tensor("A", shape), tensor("B", shape), tensor("X", shape, output=True), tensor("Y", shape, output=True)]
    return PlanFile(tensors, {"X": ["add", "A", "B"], "Y": ["sub", "A", "B"]}, **more)

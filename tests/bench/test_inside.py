"""The measurement of whole requests inside of the kernel process runs, with the classes of today."""

import pytest

from bench import inside
from bench.inside_apart import PATHS


def test_each_path_takes_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "WARM_UP", 1)
    monkeypatch.setattr(inside, "ROUNDS", 2)
    measured = inside.measure()
    assert list(measured) == list(PATHS)
    assert min(measured.values()) > 0

"""The parts of a request that `python -m bench micro` measures can be run."""

from __future__ import annotations

import pytest

from bench import micro


@pytest.mark.parametrize("name", micro.operations())
def test_a_part_runs_again_and_again(name: str) -> None:
    operation = micro.operations()[name]
    for _ in range(3):
        operation()

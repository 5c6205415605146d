"""A few loads and unloads of each backend leave neither memory nor descriptors, threads or processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.rows.unloads import BACKENDS, unloaded

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unloaded_model_leaves_nothing(backend: str, tmp_path: Path) -> None:
    assert unloaded(backend, tmp_path, 10).wrong == []

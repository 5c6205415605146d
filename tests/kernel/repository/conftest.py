from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from schedulers.direct import direct
from tests.kernel.repository_lab import RepositoryLab

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def lab(tmp_path: Path) -> RepositoryLab:
    return RepositoryLab(tmp_path, direct)

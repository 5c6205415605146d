from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.repository.testing import RepositoryLab
from schedulers.direct import direct

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def lab(tmp_path: Path) -> RepositoryLab:
    return RepositoryLab(tmp_path, direct)

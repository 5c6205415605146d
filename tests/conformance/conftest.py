"""One server over `tests/models` for all conformance tests, in explicit mode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    models = Path(__file__).parents[1] / "models"
    with ServerProcess(models, "--model-control-mode=explicit", "--load-model=*") as running:
        yield running
        assert "Traceback" not in running.log, running.log

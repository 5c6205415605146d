"""Two servers over `tests/models` for all conformance tests, in explicit mode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", params=["true", "false"], ids=["shared memory", "no shared memory"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server whose workers share memory with it, and one whose workers are reached as on other hosts."""
    models = Path(__file__).parents[1] / "models"
    flags = ("--model-control-mode=explicit", "--load-model=*", f"--worker-shared-memory={request.param}")
    with ServerProcess(models, *flags) as running:
        yield running
        assert "Traceback" not in running.log, running.log

"""Model repositories that the tests of whole servers use."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.server import ServerProcess

#: Writes one Python model: name, configuration behind `backend`, source of model.py.
WriteModel = Callable[[str, str, str], Path]


@pytest.fixture(params=["fork", "spawn"])
def worker_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start the workers of all servers of a test in one way."""
    start: str = request.param
    monkeypatch.setattr(ServerProcess, "more_flags", (f"--worker-start={start}",))
    return start


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """Return a function that writes a Python model into the repository `tmp_path`."""

    def write(name: str, config: str, source: str) -> Path:
        folder = tmp_path / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(f'backend: "python"\n{config}')
        (folder / "1" / "model.py").write_text(
            "import numpy as np\nimport triton_python_backend_utils as pb_utils\n" + textwrap.dedent(source)
        )
        return tmp_path

    return write

"""Model repositories that the tests of whole servers use."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.server import ServerProcess
from shm.region import Region
from tests import fake_cuda
from tests.end_to_end import front_doors

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


@pytest.fixture(scope="module")
def door_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of the tests of front doors in processes of their own."""
    return front_doors.write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def door_server(door_models: Path) -> Iterator[ServerProcess]:
    """A server with front doors in processes of their own, and all models of `door_models`."""
    with front_doors.serving(door_models, "--model-control-mode=explicit", "--load-model=*") as running:
        yield running


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The byte sizes of what this process reads of shared memory: the one way to do so is `Region.view`."""
    found: list[int] = []
    view = Region.view

    def counted(region: Region, offset: int, byte_size: int) -> memoryview:
        found.append(byte_size)
        return view(region, offset, byte_size)

    monkeypatch.setattr(Region, "view", counted)
    return found


def _with_a_device(free: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a region that ends have its device: garbage may be collected in any later test, also in one without a GPU."""

    def free_region(region: Any) -> None:
        with pytest.MonkeyPatch.context() as context:
            context.setenv("FAKE_CUDA_DEVICES", str(region._device_id + 1))
            free(region)

    return free_region


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tritonclient's module for CUDA shared memory, on the fake."""
    for name in [name for name in sys.modules if name == "cuda" or name.startswith("cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    before = dict(sys.modules)
    fake_cuda.install()
    name = "tritonclient.utils.cuda_shared_memory"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    region = importlib.import_module(f"{name}._utils").CudaSharedMemoryRegion
    region.__del__ = _with_a_device(region.__del__)
    yield module
    for each in set(sys.modules) - set(before):
        if each == "cuda" or each.startswith(("cuda.", name)):
            del sys.modules[each]

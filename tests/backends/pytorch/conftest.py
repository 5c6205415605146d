"""PyTorch models in a temporary model repository."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from backends.base import ModelArguments
from backends.pytorch.backend import PyTorchBackend

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends.conftest import Lab


class TorchModels:
    """Loads a model called `model`, whose file a test has written."""

    def __init__(self, root: Path, lab: Lab) -> None:
        self.dir = root / "model"
        self.file = self.dir / "1" / "model.pt"
        self.file.parent.mkdir(parents=True)
        self._lab = lab

    def arguments(self, config: dict[str, Any] | None = None, **more: Any) -> ModelArguments:
        return ModelArguments({"name": "model", **(config or {})}, self.dir, 1, "model_0_0", **more)

    def loaded(self, config: dict[str, Any] | None = None, **more: Any) -> PyTorchBackend:
        backend = PyTorchBackend(self._lab)
        backend.load(self.arguments(config, **more))
        return backend


@pytest.fixture
def models(tmp_path: Path, lab: Lab) -> TorchModels:
    return TorchModels(tmp_path, lab)


def tensors(*names: str, datatype: str = "FP32", dims: list[int] | None = None) -> list[dict[str, Any]]:
    return [{"name": name, "data_type": f"TYPE_{datatype}", "dims": dims or [-1]} for name in names]


def config_of(inputs: list[Any], outputs: list[Any], batch: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": "model", "max_batch_size": batch, "input": inputs, "output": outputs, **more}

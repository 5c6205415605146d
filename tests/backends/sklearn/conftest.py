"""Models of scikit-learn in model folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.sklearn.backend import SklearnBackend

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import Config
    from shm.arrays import Array
    from tests.backends.conftest import Lab

FEATURES = 4

#: A setting of the server: --allow-pickle=true.
ALLOWED = {"allow-pickle": "true"}


def rows(count: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).random((count, FEATURES))


def words(given: Array) -> Array:
    """Return the classes of rows: two words."""
    return np.where(given[:, 0] > 0.5, "high", "low")


class SklearnModels:
    """A model folder."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        self.version = folder / "1"
        self.version.mkdir()
        self._folder = folder
        self._lab = lab

    def arguments(
        self, config: Config | None = None, settings: dict[str, str] | None = None, **parameters: str
    ) -> ModelArguments:
        given: Config = {"name": "m", "parameters": {key: {"string_value": value} for key, value in parameters.items()}}
        return ModelArguments({**given, **(config or {})}, self._folder, 1, "m_0", backend_config=settings or {})

    def loaded(
        self, config: Config | None = None, settings: dict[str, str] | None = None, **parameters: str
    ) -> SklearnBackend:
        """Return the backend with the model, whose configuration is completed first."""
        backend = SklearnBackend(self._lab)
        completed = backend.complete(self.arguments(config, settings, **parameters))
        backend.load(ModelArguments(completed, self._folder, 1, "m_0", backend_config=settings or {}))
        return backend


@pytest.fixture
def models(tmp_path: Path, lab: Lab) -> SklearnModels:
    return SklearnModels(tmp_path, lab)

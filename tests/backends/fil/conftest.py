"""Models of trees, made by the libraries in milliseconds, in repositories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.fil.backend import FilBackend

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import Config
    from shm.arrays import Array
    from tests.backends.conftest import Lab

FEATURES = 5


def rows(count: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).random((count, FEATURES), np.float32)


def targets(given: Array, classes: int) -> Array:
    """Return what models are fitted to: numbers for 0 `classes`, else classes."""
    return given[:, 2] + given[:, 0] if not classes else (given[:, 0] * classes).astype(int)


def fitted(kind: Any, classes: int, **options: Any) -> Any:
    """Return a small model of XGBoost, LightGBM or scikit-learn, fitted to random rows."""
    given = rows(300, seed=0)
    return kind(n_estimators=8, **options).fit(given, targets(given, classes))


class FilModels:
    """A model folder."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        self.version = folder / "1"
        self.version.mkdir()
        self._folder = folder
        self._lab = lab

    def arguments(self, config: Config | None = None, **parameters: str) -> ModelArguments:
        given: Config = {"name": "m", "parameters": {key: {"string_value": value} for key, value in parameters.items()}}
        return ModelArguments({**given, **(config or {})}, self._folder, 1, "m_0")

    def loaded(self, config: Config | None = None, **parameters: str) -> FilBackend:
        """Return the backend with the model, whose configuration is completed first."""
        backend = FilBackend(self._lab)
        arguments = self.arguments(config, **parameters)
        completed = backend.complete(arguments)
        backend.load(ModelArguments(completed, self._folder, 1, "m_0"))
        return backend


@pytest.fixture
def models(tmp_path: Path, lab: Lab) -> FilModels:
    return FilModels(tmp_path, lab)

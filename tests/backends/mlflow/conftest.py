"""Folders as MLflow saves them, without MLflow: the file MLmodel as text, and the libraries' own files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.mlflow.backend import MlflowBackend

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import Config
    from shm.arrays import Array
    from tests.backends.conftest import Lab

#: Four columns of numbers, and one number as the output.
COLUMNS = [{"type": "double", "name": name, "required": True} for name in "abcd"]
TENSOR = [{"type": "tensor", "tensor-spec": {"dtype": "float64", "shape": [-1, 4]}}]
LABEL = [{"type": "tensor", "tensor-spec": {"dtype": "int64", "shape": [-1]}}]


def rows(count: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).random((count, 4))


def by_column(given: Array) -> dict[str, Array]:
    """Return rows as inputs `a` to `d`."""
    return {name: given[:, [number]] for number, name in enumerate("abcd")}


def mlmodel(flavour: str, fields: dict[str, Any], inputs: Any = None, outputs: Any = None, **general: Any) -> str:
    """Return the text of a file MLmodel, in the form that MLflow 3 writes."""
    module = general.pop("loader_module", f"mlflow.{flavour}")
    lines = ["artifact_path: model", "flavors:", "  python_function:", "    env:", "      virtualenv: python_env.yaml"]
    lines += [f"    {key}: {value}" for key, value in {"loader_module": module, **general}.items()]
    lines += [f"  {flavour}: {json.dumps(fields)}"]  # JSON is YAML
    lines += ["mlflow_version: 3.1.0", "model_uuid: 5b0c8f7d", "utc_time_created: '2026-01-02 03:04:05.000000'"]
    if inputs is not None:
        lines += ["signature:", f"  inputs: '{json.dumps(inputs)}'"]
        lines += [f"  outputs: {'null' if outputs is None else repr(json.dumps(outputs))}", "  params: null"]
    return "\n".join(lines) + "\n"


class MlflowFolder:
    """A model folder whose version is a folder of MLflow."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        self.version = folder / "1"
        self.version.mkdir()
        self._folder = folder
        self._lab = lab

    def write(self, *args: Any, **general: Any) -> None:
        (self.version / "MLmodel").write_text(mlmodel(*args, **general))

    def arguments(
        self, config: Config | None = None, settings: dict[str, str] | None = None, **parameters: str
    ) -> ModelArguments:
        given: Config = {"name": "m", "parameters": {key: {"string_value": value} for key, value in parameters.items()}}
        return ModelArguments({**given, **(config or {})}, self._folder, 1, "m_0", backend_config=settings or {})

    def completed(
        self, config: Config | None = None, settings: dict[str, str] | None = None, **parameters: str
    ) -> Config:
        return MlflowBackend(self._lab).complete(self.arguments(config, settings, **parameters))

    def loaded(
        self, config: Config | None = None, settings: dict[str, str] | None = None, **parameters: str
    ) -> MlflowBackend:
        """Return the backend with the model, whose configuration is completed first."""
        backend = MlflowBackend(self._lab)
        completed = backend.complete(self.arguments(config, settings, **parameters))
        backend.load(ModelArguments(completed, self._folder, 1, "m_0", backend_config=settings or {}))
        return backend


@pytest.fixture
def folder(tmp_path: Path, lab: Lab) -> MlflowFolder:
    return MlflowFolder(tmp_path, lab)

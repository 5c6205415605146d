"""One model of the repository as the lifecycle needs it: its configuration, step by step, and its versions.

read      config.pbtxt or an override → message; backend and defaults filled in, checked
complete  done by a worker, outside of here
prepare   normalised and checked again, as JSON for workers and as the spec of requests
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.config.autofill import fill_backend, normalise
from kernel.config.check import check_complete, check_config
from kernel.config.load import from_json, from_pbtxt
from kernel.config.spec import ModelSpec, model_spec
from kernel.config.to_json import to_json
from kernel.errors import BadConfig, NotFound, Unsupported
from kernel.repository.layout import find_models
from kernel.repository.local import list_repository, read_config
from kernel.repository.versions import choose_versions, missing_versions

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.repository.layout import ModelFolder, RepositoryContents


class Prepared(msgspec.Struct, frozen=True):
    """A complete configuration in the three forms that are used."""

    config: ModelConfig
    json: str
    spec: ModelSpec


def scan(repositories: tuple[Path, ...]) -> RepositoryContents:
    """Read the repositories' folders. Blocks. Raises `InternalError`."""
    return find_models({str(path): list_repository(str(path)) for path in repositories})


class ModelSource:
    """A model's folder, and how its configuration comes about."""

    def __init__(self, folder: ModelFolder, *, gpu_count: int, auto_complete: bool) -> None:
        self.folder = folder
        self._gpu_count = gpu_count
        self._auto_complete = auto_complete

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def path(self) -> Path:
        return Path(self.folder.path)

    def read(self, override: str | None = None) -> ModelConfig:
        """Return the configuration as far as it is known without the model file. Blocks.

        `override` is a configuration in JSON that replaces the file. Raises `ServingError`.
        """
        if override is not None:
            config = from_json(override, f"Invalid config override for model '{self.name}'")
        else:
            path = self.folder.config_path()
            if path is None and not self._auto_complete:
                raise NotFound(f"model configuration is not provided for model '{self.name}'")
            config = from_pbtxt(None if path is None else read_config(path), path or "")
        fill_backend(config, self.name, self.folder.first_version_files())
        normalise(config, self._gpu_count)
        check_config(config, self.name)
        return config

    def versions(self, config: ModelConfig) -> list[int]:
        """Return the versions to load. Raises `BadConfig` where there is none."""
        return choose_versions(config, self.folder.versions)

    def warnings(self, config: ModelConfig) -> list[str]:
        """Return what an operator should know of the folder, one line each."""
        return [*self.folder.warnings, *missing_versions(config, self.folder.versions)]

    def complete(self, config: ModelConfig, completed: str) -> ModelConfig:
        """Return `completed`, what a worker made of `config`. Raises `BadConfig`."""
        return from_json(completed, f"the backend '{config.backend}' completed the configuration wrongly")

    def prepare(self, config: ModelConfig) -> Prepared:
        """Check a complete configuration and return what loading needs. Raises `ServingError`."""
        normalise(config, self._gpu_count)
        check_config(config, self.name)
        check_complete(config, self._gpu_count)
        self._check_label_files(config)
        return Prepared(config, to_json(config), model_spec(config))

    def _check_label_files(self, config: ModelConfig) -> None:
        """Label files are read by the worker: they must be there, and inside of the model's folder."""
        root = self.path.resolve()
        for output in config.output:
            if not output.label_filename:
                continue
            path = (root / output.label_filename).resolve()
            if not path.is_relative_to(root):
                raise Unsupported(
                    f"label file path '{output.label_filename}' for output '{output.name}' is outside model directory"
                )
            if not path.is_file():
                raise BadConfig(
                    f"label file '{output.label_filename}' of output '{output.name}' is not in the folder of model "
                    f"'{self.name}'"
                )

"""Which Python a model's workers run on, if it is not the server's: read from its configuration and its files.

`EXECUTION_ENV_PATH` is Triton's parameter: a folder with an environment, or an archive of one that conda-pack has made.
Beyond Triton, a `requirements.txt` or a `pyproject.toml` beside the model's file has packages that are installed.
`backends/environments/` makes the environment, when the first worker is started.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import BadConfig
from kernel.regular_files import read_regular

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig

PARAMETER = "EXECUTION_ENV_PATH"

#: Stands for the model's folder in the repository, as in Triton.
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"

REQUIREMENTS_FILE = "requirements.txt"
PROJECT_FILE = "pyproject.toml"

#: The most bytes of a file of requirements.
_MAX_BYTE_SIZE = 1 << 20


class EnvironmentSettings(msgspec.Struct, frozen=True):
    """Where environments are made, and what they may take."""

    #: The folder that they are made in; "" for one in the user's cache folder.
    cache_folder: str = ""
    #: The most bytes of all of them together.
    cache_byte_size: int = 20 << 30
    #: Seconds that making one may take; 0 for no limit.
    timeout_s: float = 900
    #: Whether packages of a file of requirements beside a model's file are installed.
    installs: bool = True


class ExecutionEnvironment(msgspec.Struct, frozen=True):
    """An environment of a model's own. One of the two paths is set; both are absolute."""

    #: A folder with an environment, or an archive of one.
    path: str = ""
    #: A file of requirements, whose packages are installed.
    requirements: str = ""


def environment_path(config: ModelConfig, model_dir: str) -> str:
    """Return the path that `EXECUTION_ENV_PATH` names; "" if the model does not have the parameter. Pure."""
    text = config.parameters[PARAMETER].string_value if PARAMETER in config.parameters else ""
    return os.path.abspath(text.replace(MODEL_FOLDER, model_dir)) if text else ""


def check_within(path: str, model_dir: str, name: str) -> None:
    """Raise `BadConfig` unless `path` lies in the model's folder: the path came with a load request.

    A client that may load models may not run other programs of this machine. Reads links of the file system.
    """
    folder = os.path.realpath(model_dir)
    if os.path.commonpath([os.path.realpath(path), folder]) != folder:
        raise BadConfig(
            f"model '{name}': {PARAMETER} of a configuration in a load request must name a file or folder of the model "
            f"({MODEL_FOLDER}/...), or be that of the model's config.pbtxt"
        )


def requirements_beside(config: ModelConfig, model_dir: str, version: int) -> str:
    """Return the path of the file of requirements beside the model's file; "" if it has none that names a package.

    Blocks. Raises `BadConfig` if the file cannot be read.
    """
    beside = Path(model_dir, str(version), config.default_model_filename or "model.py").parent
    for name, names_packages in ((REQUIREMENTS_FILE, _has_lines), (PROJECT_FILE, _has_dependencies)):
        file = beside / name
        if not file.is_file():
            continue
        try:
            content = read_regular(file, _MAX_BYTE_SIZE + 1)
            if len(content) > _MAX_BYTE_SIZE:
                raise ValueError(f"it has more than {_MAX_BYTE_SIZE} bytes")
            if names_packages(content.decode()):
                return str(file.absolute())
        except (OSError, ValueError) as error:  # bad UTF-8 and bad TOML are ValueErrors
            raise BadConfig(f"model '{config.name}': its {name} cannot be read: {error}") from error
    return ""


def _has_lines(text: str) -> bool:
    return any(line.strip() and not line.strip().startswith("#") for line in text.splitlines())


def _has_dependencies(text: str) -> bool:
    import tomllib  # few models have such a file

    project = tomllib.loads(text).get("project", {})
    return isinstance(project, dict) and bool(project.get("dependencies"))

"""Which environment a model has is read from its configuration and from the files beside its own."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from google.protobuf import text_format

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.gpus import NO_GPUS
from kernel.errors import BadConfig
from kernel.repository.execution_environment import (
    ExecutionEnvironment,
    check_within,
    environment_path,
    requirements_beside,
)
from kernel.repository.source import ModelSource, scan
from kernel.repository.worker_needs import worker_needs

if TYPE_CHECKING:
    from pathlib import Path


def config(text: str = "") -> ModelConfig:
    return text_format.Parse(f'name: "m" backend: "python" {text}', ModelConfig())


def named(path: str) -> ModelConfig:
    return config(f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}')


def test_the_path_may_name_the_folder_of_the_model() -> None:
    assert environment_path(named("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), "/models/m") == "/models/m/env.tar.gz"
    assert environment_path(named("/opt/env"), "/models/m") == "/opt/env"
    assert environment_path(named("env"), "/models/m") == os.path.abspath("env")
    assert environment_path(config(), "/models/m") == environment_path(named(""), "/models/m") == ""


def test_a_path_of_a_load_request_must_lie_in_the_folder_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "out").symlink_to(tmp_path)
    (tmp_path / "m2").mkdir()
    check_within(f"{model}/env.tar.gz", str(model), "m")
    for path in (f"{tmp_path}/m2", "/usr", f"{model}/../m2", f"{model}/out/env"):
        with pytest.raises(BadConfig, match="must name a file or folder of the model"):
            check_within(path, str(model), "m")


@pytest.fixture
def version(tmp_path: Path) -> Path:
    (tmp_path / "1").mkdir()
    return tmp_path / "1"


def beside(version: Path, text: str = "") -> str:
    return requirements_beside(config(text), str(version.parent), 1)


def test_requirements_lie_beside_the_file_of_the_model(version: Path) -> None:
    assert beside(version) == ""
    (version.parent / "requirements.txt").write_text("six\n")
    assert beside(version) == "", "that of the model's folder is for people"
    (version / "pyproject.toml").write_text('[project]\ndependencies = ["six"]\n')
    assert beside(version) == str(version / "pyproject.toml")
    (version / "requirements.txt").write_text("six\n")
    assert beside(version) == str(version / "requirements.txt"), "it comes first"
    (version / "deep").mkdir()
    assert beside(version, 'default_model_filename: "deep/model.py"') == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("requirements.txt", ""), ("requirements.txt", "# nothing\n\n  # at all\n"),
        ("pyproject.toml", "[tool.ruff]\nline-length = 100\n"), ("pyproject.toml", "[project]\ndependencies = []\n"),
        ("pyproject.toml", "project = 1"),
    ],
)  # fmt: skip
def test_a_file_that_names_no_package_makes_no_environment(version: Path, name: str, text: str) -> None:
    (version / name).write_text(text)
    assert beside(version) == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [("requirements.txt", b"\xff\xfe"), ("pyproject.toml", b"[project"), ("requirements.txt", b"#" * (2 << 20))],
)
def test_a_file_that_cannot_be_read_is_refused(version: Path, name: str, content: bytes) -> None:
    (version / name).write_bytes(content)
    with pytest.raises(BadConfig, match=f"model 'm': its {name} cannot be read: "):
        beside(version)


def test_an_environment_cannot_share_a_process_or_preload(tmp_path: Path) -> None:
    own = ExecutionEnvironment(path="/opt/env")
    assert worker_needs(config(), str(tmp_path), own).environment == own
    for name, text in (("naiad.worker", "share a process"), ("naiad.preload", "preload modules")):
        shared = config(f'parameters {{ key: "{name}" value {{ string_value: "json" }} }}')
        with pytest.raises(BadConfig, match=f"environment of its own \\('/opt/env'\\) and cannot {text}"):
            worker_needs(shared, str(tmp_path), own)
    (tmp_path / "preload.py").write_text("")
    with pytest.raises(BadConfig, match="preload"):
        worker_needs(config(), str(tmp_path), own)


# ---- where the configuration and the files come from -----------------------------------------

PYTHON = 'backend: "python"'
NAMED = PYTHON + ' parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/opt/env" } }'


def source(root: Path, text: str, *, files_of_request: bool = False) -> ModelSource:
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(text)
    (root / "m" / "1" / "requirements.txt").write_text("six\n")
    folder = scan((root,)).models["m"]
    return ModelSource(folder, gpus=NO_GPUS, auto_complete=True, files_of_request=files_of_request)


def found(model: ModelSource, override: str | None = None, *, installs: bool = True) -> ExecutionEnvironment | None:
    return model.environment(model.read(override), 1, installs=installs)


def with_path(path: str) -> str:
    parameters = {"EXECUTION_ENV_PATH": {"string_value": path}}
    return json.dumps({"backend": "python", "parameters": parameters})


def test_a_path_in_the_configuration_comes_before_requirements(tmp_path: Path) -> None:
    assert found(source(tmp_path / "a", NAMED)) == ExecutionEnvironment(path="/opt/env")
    file = tmp_path / "b" / "m" / "1" / "requirements.txt"
    assert found(source(tmp_path / "b", PYTHON)) == ExecutionEnvironment(requirements=str(file))


def test_nothing_is_installed_for_files_of_a_load_request_or_where_it_is_switched_off(tmp_path: Path) -> None:
    assert found(source(tmp_path / "a", PYTHON, files_of_request=True), '{"backend": "python"}') is None
    assert found(source(tmp_path / "b", PYTHON), installs=False) is None


def test_models_of_other_backends_have_no_environment(tmp_path: Path) -> None:
    assert found(source(tmp_path, NAMED.replace("python", "identity"))) is None


def test_a_load_request_may_name_the_environment_of_config_pbtxt_or_one_of_the_model(tmp_path: Path) -> None:
    model = source(tmp_path, NAMED)
    assert found(model, with_path("/opt/env")) == ExecutionEnvironment(path="/opt/env")
    own = found(model, with_path("$$TRITON_MODEL_DIRECTORY/env"))
    assert own == ExecutionEnvironment(path=f"{model.path}/env")
    with pytest.raises(BadConfig, match="must name a file or folder of the model"):
        found(model, with_path("/opt/other"))


def test_files_of_a_load_request_do_not_vouch_for_a_path(tmp_path: Path) -> None:
    model = source(tmp_path, NAMED, files_of_request=True)
    with pytest.raises(BadConfig, match="must name a file or folder of the model"):
        found(model, with_path("/opt/env"))


def test_a_config_pbtxt_that_cannot_be_read_vouches_for_nothing(tmp_path: Path) -> None:
    model = source(tmp_path, "backend: {")
    with pytest.raises(BadConfig, match="must name a file or folder of the model"):
        found(model, with_path("/opt/env"))

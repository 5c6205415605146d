"""`naiad models` finds what a server would stumble over, without loading a model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kernel.config.autofill import normalise
from kernel.config.gpus import NO_GPUS
from kernel.config.load import from_pbtxt
from kernel.config.to_text import to_dict
from kernel.options import DEMO_REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TENSORS = """
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
PYTHON = f'backend: "python"\n{TENSORS}'
MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
ENSEMBLE = (
    TENSORS
    + """
platform: "ensemble"
ensemble_scheduling { step [ { model_name: "%s" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } ] }
"""
)


def naiad(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernel", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def write(repository: Path, name: str, config: str | None, files: Mapping[str, str | bytes]) -> None:
    (repository / name).mkdir()
    if config is not None:
        (repository / name / "config.pbtxt").write_text(config)
    for path, content in files.items():
        file = repository / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository of models that are right, and wrong in one way each."""
    folder = tmp_path_factory.mktemp("models")
    digits = (DEMO_REPOSITORY / "digits" / "1" / "model.onnx").read_bytes()
    named = digits_config = (DEMO_REPOSITORY / "digits" / "config.pbtxt").read_text().replace("labels.txt", "")
    write(folder, "right", PYTHON, {"1/model.py": MODEL})
    write(folder, "right_file", None, {"1/model.onnx": digits})
    write(folder, "right_ensemble", ENSEMBLE % "right", {"1/.keep": ""})
    write(folder, "no_version", PYTHON, {})
    write(folder, "no_file", PYTHON, {"1/other.py": ""})
    write(folder, "no_class", PYTHON, {"1/model.py": "x = 1"})
    write(folder, "no_execute", PYTHON, {"1/model.py": MODEL.replace("execute", "exekute")})
    write(folder, "no_syntax", PYTHON, {"1/model.py": "def f(:\n"})
    write(folder, "no_backend", PYTHON.replace("python", "fortran"), {"1/model.f": ""})
    write(folder, "crash", PYTHON, {"1/model.py": "import os\nos._exit(3)\n"})
    write(folder, "cut", None, {"1/model.onnx": digits[: len(digits) // 2]})
    write(folder, "wrong_name", named.replace('"image"', '"picture"'), {"1/model.onnx": digits})
    write(folder, "wrong_dims", digits_config.replace("8, 8", "8, 9"), {"1/model.onnx": digits})
    write(folder, "gpu", PYTHON + "instance_group { kind: KIND_GPU }", {"1/model.py": MODEL})
    write(folder, "agent", PYTHON + 'model_repository_agents { agents [ { name: "nobody" } ] }', {"1/model.py": MODEL})
    write(folder, "label", PYTHON.replace("output [ {", 'output [ { label_filename: "l.txt"'), {"1/model.py": MODEL})
    write(folder, "wrong_text", "max_batch_size: many", {"1/model.py": MODEL})
    write(folder, "no_step", ENSEMBLE % "nothing", {"1/.keep": ""})
    write(folder, "bad_step", ENSEMBLE % "no_execute", {"1/.keep": ""})
    write(folder, "step_type", (ENSEMBLE % "right").replace("FP32", "FP64"), {"1/.keep": ""})
    return folder


@pytest.fixture(scope="module")
def found(repository: Path) -> dict[str, dict[str, Any]]:
    """Return what the command finds: name → entry of its JSON."""
    done = naiad("models", repository, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    return {entry["name"]: entry for entry in json.loads(done.stdout)}


def test_models_that_are_right_are_valid_and_complete(found: dict[str, dict[str, Any]]) -> None:
    right = {name for name, entry in found.items() if entry["valid"]}
    assert right == {"right", "right_file", "right_ensemble"}
    assert [tensor["name"] for tensor in found["right_file"]["config"]["input"]] == ["image"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_version", "at least one version must be available"),
        ("no_file", "Python model file not found in '"),
        ("no_class", "has no attribute 'TritonPythonModel'"),
        ("no_execute", "does not implement `execute` method."),
        ("no_syntax", "SyntaxError"),
        ("no_backend", "fortran"),
        ("crash", "the worker was lost"),
        ("cut", "model.onnx"),
        ("wrong_name", "unexpected inference input 'picture', allowed inputs are: image"),
        ("wrong_dims", "but the model configuration specifies"),
        ("gpu", "GPU"),
        ("agent", "there is no repository agent 'nobody'"),
        ("label", "l.txt"),
        ("wrong_text", "config.pbtxt:1:17"),
        ("no_step", "contains models that are not available or ambiguous: nothing"),
        ("bad_step", "depends on 'no_execute' which is not valid"),
        ("step_type", "FP64"),
    ],
)
def test_what_is_wrong_with_a_model_is_said(found: dict[str, dict[str, Any]], name: str, said: str) -> None:
    assert said in found[name]["reason"]


def test_there_is_a_hint_for_a_common_mistake(repository: Path, found: dict[str, dict[str, Any]]) -> None:
    there = f"'{repository}/no_file/1' has 'other.py': rename it to 'model.py', or write default_model_filename: "
    assert found["no_file"]["hint"] == f'{there}"other.py"'
    assert "this server uses no GPUs" in found["gpu"]["hint"]
    assert "this server has the backends add_sub, fil, identity" in found["no_backend"]["hint"]
    assert found["right"]["hint"] == ""


def test_the_quick_check_opens_no_file_of_a_model(repository: Path) -> None:
    entries = {entry["name"]: entry for entry in json.loads(naiad("models", "--quick", "--json", repository).stdout)}
    assert entries["no_execute"]["valid"]
    assert not entries["wrong_text"]["valid"]


def test_the_completed_configuration_is_shown_as_a_file_that_completes_to_the_same(
    repository: Path, found: dict[str, dict[str, Any]]
) -> None:
    done = naiad("models", repository / "right_file", "--show", "right_file")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dims: [8, 8]" in done.stdout
    assert "pinned_memory" not in done.stdout
    again = from_pbtxt(done.stdout.encode(), "config.pbtxt")
    normalise(again, NO_GPUS)
    assert to_dict(again) == found["right_file"]["config"]


def test_a_model_that_is_not_valid_cannot_be_shown(repository: Path) -> None:
    done = naiad("models", repository / "no_file", "--show", "no_file")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: model 'no_file': ")
    done = naiad("models", repository / "no_file", "--show", "other", "--quick")
    assert done.stderr == "error: there is no model 'other'; the models are: no_file\n"


def test_an_ensemble_alone_is_checked_with_the_models_of_its_steps(repository: Path) -> None:
    done = naiad("models", repository / "right_ensemble")
    assert done.returncode == 0, done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines()[3:5]] == ["right", "right_ensemble"]


def test_a_model_in_two_repositories_is_not_valid(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "right", tmp_path / "right")
    done = naiad("models", "--quick", repository, tmp_path)
    assert "right          | -        | -           | model appears in two or more repositories" in done.stdout


def test_a_path_that_is_no_folder_is_an_error_of_one_line(tmp_path: Path) -> None:
    done = naiad("models", tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: '{tmp_path / 'nothing'}' is not a folder. Give the folder of a model, or a folder of models\n"
    )


def test_an_empty_repository_says_where_the_files_belong(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    done = naiad("models", tmp_path)
    assert done.stderr.startswith(f"hint: '{tmp_path}' has no folders of models: serve one file with 'naiad run")
    assert naiad("check", tmp_path).stderr.startswith(f"error: '{tmp_path}' has no folders of models")


def test_without_a_command_the_help_is_all_that_is_printed() -> None:
    done = naiad()
    assert "Commands" in done.stdout
    assert (done.returncode, done.stderr) == (1, "")

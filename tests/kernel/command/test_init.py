"""`naiad init` writes models that are valid and pass their own tests, and overwrites nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernel.options import CHAT_DEMO_REPOSITORY, DEMO_REPOSITORY

ROOT = Path(__file__).parents[3]
ONNX = DEMO_REPOSITORY / "digits" / "1" / "model.onnx"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/kernel/importable"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60, check=False, cwd=folder, env=environment
    )


def naiad(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "kernel", *words)


def files(folder: Path) -> set[str]:
    """Return the paths of the files in `folder`, without byte code, which Python writes when the model is loaded."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_new_models_of_every_kind_are_valid_and_pass_their_tests_and_the_check(tmp_path: Path) -> None:
    for words in (
        ("models/double", "--python"),
        ("models/digits.v2", "--onnx", str(ONNX)),
        ("models/both", "--ensemble", "double,double"),
    ):
        done = naiad(tmp_path, "init", *words)
        assert (done.returncode, done.stderr) == (0, ""), words
    models = tmp_path / "models"
    assert files(models / "double") == {"config.pbtxt", "1/model.py", "test_double.py"}
    assert files(models / "digits.v2") == {"config.pbtxt", "1/model.onnx", "test_digits_v2.py"}
    assert files(models / "both") == {"config.pbtxt", "1/.gitkeep", "test_both.py"}
    listed = naiad(tmp_path, "models", "models")
    assert (listed.returncode, listed.stdout.count("valid")) == (0, 3), listed.stdout
    tested = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "models")
    assert tested.returncode == 0, tested.stdout
    checked = naiad(tmp_path, "check", "models")
    assert checked.returncode == 0, checked.stdout


def test_a_new_chat_model_is_that_of_the_demo_and_passes_its_tests(tmp_path: Path) -> None:
    done = naiad(tmp_path, "init", "models/talk", "--template", "chat")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dev models/talk --openai-port=9000" in done.stdout
    assert " check models" not in done.stdout
    assert files(tmp_path / "models/talk") == {"config.pbtxt", "1/model.py", "test_talk.py"}
    demo = CHAT_DEMO_REPOSITORY / "chat"
    for name in ("config.pbtxt", "1/model.py"):
        assert (tmp_path / "models/talk" / name).read_text() == (demo / name).read_text()
    tested = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "models")
    assert tested.returncode == 0, tested.stdout


def test_a_new_model_says_what_comes_next(tmp_path: Path) -> None:
    done = naiad(tmp_path, "init", "double")
    assert done.stdout.startswith("double: the model 'double'\n")
    assert "test_double.py  its tests\n" in done.stdout
    assert "dev double" in done.stdout
    assert "check double" in done.stdout
    assert "python -m pytest double" in done.stdout
    assert "pip install" not in done.stdout


def test_a_new_model_says_what_its_tests_need_if_it_is_not_installed(tmp_path: Path) -> None:
    without = (
        "import importlib.util as util; find = util.find_spec;"
        "util.find_spec = lambda name, *others: None if name == 'pytest' else find(name, *others);"
        "from kernel.command.main import main; main()"
    )
    done = run(tmp_path, "-c", without, "init", "double")
    assert done.returncode == 0, done.stderr
    install, tests = done.stdout.splitlines()[-2:]
    assert re.search(r"python\S* -m pip install pytest +its tests need pytest", install)
    assert re.search(r"python\S* -m pytest double +run its tests", tests)


def test_the_name_is_the_last_part_of_the_path_and_a_new_folder_of_models_is_said(tmp_path: Path) -> None:
    first, second = naiad(tmp_path, "init", "team/double"), naiad(tmp_path, "init", "team/half/")
    assert first.stdout.startswith("team/double: the model 'double', in the new folder of models 'team'\n")
    assert second.stdout.startswith("team/half: the model 'half', in the folder of models 'team'\n")
    assert {path.name for path in (tmp_path / "team").iterdir()} == {"double", "half"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("there",), "'there' already exists, and is not overwritten: give another name"),
        (("file",), "'file' already exists, and is not overwritten: give another name"),
        ((".hidden",), "'.hidden' cannot be the folder of a model: servers ignore hidden folders"),
        (("a\nb",), "must not contain control characters"),
        (("absent/models/double",), "'absent/models' cannot be the folder of models: 'absent' does not exist"),
        (("there/double",), "'there' cannot be the folder of models: it is the folder of a model"),
        (("there/1/double",), "'there/1' cannot be the folder of models: 'there' is the folder of a model"),
        (("file/double",), "'file' cannot be the folder of models: it is a file"),
        (("x", "--onnx", "nothing.onnx"), "'nothing.onnx' is not a file"),
        (("x", "--onnx", "file"), "'file' cannot be loaded: "),
        (("x", "--ensemble", "there,nothing"), "there is no model 'nothing' in '"),
        (("x", "--ensemble", "there"), "'there' cannot be loaded: "),
        (("x", "--python", "--onnx", "file"), "give one of --python, --onnx, --ensemble and --template"),
        (("x", "--template", "talk"), "there is no template 'talk': expected chat"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line_and_nothing_is_written(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "there" / "1").mkdir(parents=True)
    (tmp_path / "there" / "kept").write_text("kept")
    (tmp_path / "file").write_text("no model")
    before = files(tmp_path)
    done = naiad(tmp_path, "init", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert files(tmp_path) == before
    assert not (tmp_path / "x").exists()

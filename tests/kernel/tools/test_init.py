"""`naiad init` writes models that are valid and pass their own tests, and overwrites nothing.

Models one after the other become an ensemble.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernel.config.autofill import normalise
from kernel.config.check import check_complete, check_config
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.gpus import NO_GPUS
from kernel.config.load import from_pbtxt
from kernel.errors import BadConfig
from kernel.options import CHAT_DEMO_REPOSITORY, DEMO_REPOSITORY
from kernel.tools.init import chain

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


def test_a_new_function_needs_no_configuration_and_passes_its_tests(tmp_path: Path) -> None:
    done = naiad(tmp_path, "init", "models/scale", "--template", "function")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dev models/scale " in done.stdout
    assert "--openai-port" not in done.stdout
    assert files(tmp_path / "models/scale") == {"1/model.py", "test_scale.py"}
    tested = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "models")
    assert tested.returncode == 0, tested.stdout
    checked = naiad(tmp_path, "check", "models")
    assert checked.returncode == 0, checked.stdout


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
        "from kernel.tools.main import main; main()"
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
        (("x", "--template", "talk"), "there is no template 'talk': expected chat or function"),
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


def model(name: str, inputs: str, outputs: str, *, batch: int = 0, datatype: str = "FP32") -> ModelConfig:
    """Return a model; `inputs` and `outputs` are names, each with its dims: "A:2 B:-1"."""
    text = f'name: "{name}" max_batch_size: {batch} '
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors.split():
            tensor_name, _, dims = tensor.partition(":")
            text += f'{kind} {{ name: "{tensor_name}" data_type: TYPE_{datatype} dims: [ {dims} ] }} '
    return from_pbtxt(text.encode(), "")


def maps(config: ModelConfig) -> list[tuple[dict[str, str], dict[str, str]]]:
    return [(dict(step.input_map), dict(step.output_map)) for step in config.ensemble_scheduling.step]


def tensors(config: ModelConfig) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    return {each.name: list(each.dims) for each in config.input}, {each.name: list(each.dims) for each in config.output}


def checked(name: str, *models: ModelConfig) -> ModelConfig:
    """Return the ensemble, after the checks of a load."""
    config = chain(name, models)
    complete = ModelConfig()
    complete.CopyFrom(config)
    normalise(complete, NO_GPUS)
    check_config(complete, name)
    check_complete(complete, NO_GPUS)
    return config


def test_the_only_output_goes_to_the_only_input() -> None:
    config = checked("e", model("a", "X:2", "Y:3"), model("b", "IN:3", "OUT:4"))
    assert maps(config) == [({"X": "X"}, {"Y": "Y"}), ({"IN": "Y"}, {"OUT": "OUT"})]
    assert tensors(config) == ({"X": [2]}, {"OUT": [4]})


def test_equal_names_are_connected_and_what_nobody_makes_comes_from_the_client() -> None:
    config = checked("e", model("a", "X:2", "Y:3 UNUSED:1"), model("b", "Y:3 MASK:5", "OUT:4"))
    assert maps(config) == [({"X": "X"}, {"Y": "Y"}), ({"Y": "Y", "MASK": "MASK"}, {"OUT": "OUT"})]
    assert tensors(config) == ({"X": [2], "MASK": [5]}, {"OUT": [4]})


def test_a_later_step_may_use_an_output_of_an_earlier_one() -> None:
    config = checked("e", model("a", "X:2", "Y:3"), model("b", "Y:3", "Z:4"), model("c", "Z:4 Y:3", "OUT:1"))
    assert maps(config)[2] == ({"Z": "Z", "Y": "Y"}, {"OUT": "OUT"})


def test_the_same_model_twice_keeps_the_tensors_apart() -> None:
    twice = model("a", "IN:2", "OUT:2")
    config = checked("e", twice, twice)
    assert maps(config) == [({"IN": "IN"}, {"OUT": "OUT"}), ({"IN": "OUT"}, {"OUT": "a_OUT"})]


def test_batching_is_that_of_all_models() -> None:
    config = checked("e", model("a", "X:2", "Y:3", batch=8), model("b", "Y:3", "OUT:4", batch=4))
    assert config.max_batch_size == 4
    assert tensors(config) == ({"X": [2]}, {"OUT": [4]})


def test_rows_are_a_dimension_if_one_model_does_not_batch() -> None:
    config = checked("e", model("a", "X:2", "Y:3", batch=8), model("b", "Y:-1,3", "OUT:4"))
    assert config.max_batch_size == 0
    assert tensors(config) == ({"X": [-1, 2]}, {"OUT": [4]})


def test_steps_that_have_nothing_in_common_are_refused_with_their_tensors() -> None:
    with pytest.raises(BadConfig, match=r"no output of 'a' \(Y, Z\) is an input of 'b' \(V, W\): name them alike"):
        chain("e", [model("a", "X:2", "Y:3 Z:3"), model("b", "V:3 W:3", "OUT:4")])


def test_tensors_of_another_type_are_refused() -> None:
    with pytest.raises(BadConfig, match="TYPE_INT32"):
        chain("e", [model("a", "X:2", "Y:3"), model("b", "IN:3", "OUT:4", datatype="INT32")])


def test_a_decoupled_step_makes_the_ensemble_decoupled() -> None:
    decoupled = model("a", "X:2", "Y:3")
    decoupled.model_transaction_policy.decoupled = True
    assert checked("e", decoupled, model("b", "Y:3", "OUT:4")).model_transaction_policy.decoupled

"""A model's configuration, from its folder to the forms that workers and requests use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kernel.config.gpus import NO_GPUS
from kernel.config.to_json import to_json
from kernel.errors import BadConfig, InternalError, NotFound, ServingError, Unsupported
from kernel.repository.layout import ModelFolder
from kernel.repository.source import ModelSource, scan

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
backend: "identity"
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_FP32 dims: [2] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [2] %s }]
"""


def source(root: Path, config: str | None, *, auto_complete: bool = True, files: tuple[str, ...] = ()) -> ModelSource:
    """Return model `m` in the repository `root`, with version 1 and `files` of two lines."""
    (root / "m" / "1").mkdir(parents=True)
    if config is not None:
        (root / "m" / "config.pbtxt").write_text(config)
    for name in files:
        (root / "m" / name).write_text("a\nb\n")
    folder = scan((root,)).models["m"]
    return ModelSource(folder, gpus=NO_GPUS, auto_complete=auto_complete)


def test_a_configuration_becomes_json_and_a_spec(tmp_path: Path) -> None:
    model = source(tmp_path, CONFIG % "")
    config = model.read()
    assert model.versions(config) == [1]
    prepared = model.prepare(config)
    assert prepared.spec.inputs["IN"].shape == (-1, 2)
    assert '"max_batch_size":4' in prepared.json


def test_a_missing_configuration_is_an_error_only_without_auto_completion(tmp_path: Path) -> None:
    model = source(tmp_path, None, files=("1/model.onnx",))
    assert model.read().backend == "onnxruntime"
    strict = ModelSource(model.folder, gpus=NO_GPUS, auto_complete=False)
    with pytest.raises(NotFound, match="^model configuration is not provided for model 'm'$"):
        strict.read()


def test_an_override_replaces_the_file(tmp_path: Path) -> None:
    model = source(tmp_path, CONFIG % "")
    assert model.read('{"backend": "identity", "max_batch_size": 7}').max_batch_size == 7
    with pytest.raises(BadConfig, match="Invalid config override"):
        model.read('{"no_such_field": 1}')


def test_an_error_names_file_line_and_column(tmp_path: Path) -> None:
    model = source(tmp_path, 'backend: "identity"\nmax_batch_size: many\n')
    with pytest.raises(BadConfig, match=r"m/config\.pbtxt:2:17"):
        model.read()


def test_label_files_must_exist(tmp_path: Path) -> None:
    good = source(tmp_path / "a", CONFIG % 'label_filename: "labels.txt"', files=("labels.txt",))
    good.prepare(good.read())
    absent = source(tmp_path / "b", CONFIG % 'label_filename: "labels.txt"')
    with pytest.raises(InternalError) as caught:
        absent.prepare(absent.read())
    assert caught.value.message == (
        f"failed to open text file for read {tmp_path}/b/m/labels.txt: No such file or directory"
    )


@pytest.mark.parametrize("path", ["../labels.txt", "/labels.txt", "a/../../labels.txt", "..", "linked.txt"])
def test_label_files_outside_of_the_models_folder_are_refused(path: str, tmp_path: Path) -> None:
    model = source(tmp_path, CONFIG % f'label_filename: "{path}"')
    os.symlink("/etc/passwd", tmp_path / "m" / "linked.txt")
    with pytest.raises(Unsupported) as caught:
        model.prepare(model.read())
    assert caught.value.message == (
        f"label file path '{model.path / path}' for output 'OUT' in model 'm' is outside model directory"
    )


def test_gpu_instances_are_refused_without_a_gpu(tmp_path: Path) -> None:
    model = source(tmp_path, CONFIG % "" + "instance_group [{ kind: KIND_GPU }]")
    with pytest.raises(ServingError, match="has kind KIND_GPU but"):
        model.prepare(model.read())


@pytest.mark.parametrize(("config_name", "chosen"), [("", 1), ("fast", 2), ("absent", 1)])
def test_a_configuration_can_be_chosen_by_name(config_name: str, chosen: int, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "configs").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "identity" max_batch_size: 1')
    (tmp_path / "m" / "configs" / "fast.pbtxt").write_text('backend: "identity" max_batch_size: 2')
    folder = scan((tmp_path,)).models["m"]
    model = ModelSource(folder, gpus=NO_GPUS, auto_complete=True, config_name=config_name)
    assert model.read().max_batch_size == chosen


def test_without_auto_completion_a_configuration_must_have_complete_tensors(tmp_path: Path) -> None:
    text = CONFIG % "" + 'input [{ name: "OTHER" }]'
    source(tmp_path / "a", text).read()
    with pytest.raises(BadConfig, match="^model input 'OTHER' must specify 'data_type' for m$"):
        source(tmp_path / "b", text, auto_complete=False).read()


def test_a_backend_completes_only_tensors_batching_and_transaction_policy(tmp_path: Path) -> None:
    model = source(tmp_path, 'backend: "identity" instance_group [{ count: 3 }]')
    config = model.read()
    completed = model.complete(
        config,
        """{"name": "other", "backend": "python", "max_batch_size": 8, "dynamic_batching": {}, "instance_group": [],
            "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [1]}], "version_policy": {"all": {}},
            "model_transaction_policy": {"decoupled": true}}""",
    )
    assert (completed.name, completed.backend, completed.instance_group[0].count) == ("m", "identity", 3)
    assert (completed.max_batch_size, completed.input[0].name) == (8, "A")
    assert completed.HasField("dynamic_batching")
    assert completed.model_transaction_policy.decoupled
    assert completed.version_policy.latest.num_versions == 1


def test_a_configuration_that_a_backend_leaves_as_it_is_is_not_read_again(tmp_path: Path) -> None:
    model = source(tmp_path, CONFIG % "")
    config = model.read()
    same = model.complete(config, "not even JSON", "not even JSON")
    assert same == config
    assert same is not config
    with pytest.raises(ServingError, match="returned a wrong configuration"):
        model.complete(config, "not even JSON", to_json(config))


def test_a_backend_cannot_replace_a_configured_scheduler(tmp_path: Path) -> None:
    model = source(tmp_path, 'backend: "identity" max_batch_size: 2 sequence_batching {}')
    completed = model.complete(model.read(), '{"max_batch_size": 2, "dynamic_batching": {}}')
    assert completed.WhichOneof("scheduling_choice") == "sequence_batching"


def test_a_configuration_that_no_file_and_no_backend_provides_is_an_error(tmp_path: Path) -> None:
    model = source(tmp_path, None)
    folder = model.folder
    named = ModelSource(
        ModelFolder("m.identity", folder.path, folder.entry, folder.versions), gpus=NO_GPUS, auto_complete=True
    )
    config = named.read()
    with pytest.raises(NotFound, match="^model configuration is not provided for model 'm.identity'$"):
        named.complete(config, to_json(config))


def test_warmup_files_are_read_from_their_folder(tmp_path: Path) -> None:
    warmup = """model_warmup [{ batch_size: 1 inputs { key: "IN" value { input_data_file: "%s" } } }]"""
    model = source(tmp_path, CONFIG % "" + warmup % "a")
    with pytest.raises(InternalError) as caught:
        model.read_warmup_files(model.read())
    assert caught.value.message == (
        f"failed to open text file for read {tmp_path}/m/warmup/a: No such file or directory"
    )
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "a").write_bytes(b"1234")
    assert model.read_warmup_files(model.read()) == {"a": b"1234"}

"""A model's configuration, from its folder to what workers and requests use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kernel.errors import BadConfig, NotFound, ServingError, Unsupported
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
    (root / "m" / "1").mkdir(parents=True)
    if config is not None:
        (root / "m" / "config.pbtxt").write_text(config)
    for name in files:
        (root / "m" / name).write_text("a\nb\n")
    folder = scan((root,)).models["m"]
    return ModelSource(folder, gpu_count=0, auto_complete=auto_complete)


def test_a_configuration_becomes_json_and_a_spec(tmp_path: Path) -> None:
    model = source(tmp_path, CONFIG % "")
    config = model.read()
    assert model.versions(config) == [1]
    prepared = model.prepare(config)
    assert prepared.spec.inputs["IN"].shape == (-1, 2)
    assert '"max_batch_size":4' in prepared.json


def test_a_missing_configuration_is_completed_from_the_files_unless_that_is_off(tmp_path: Path) -> None:
    model = source(tmp_path, None, files=("1/model.onnx",))
    assert model.read().backend == "onnxruntime"
    strict = ModelSource(model.folder, gpu_count=0, auto_complete=False)
    with pytest.raises(NotFound, match="^model configuration is not provided for model 'm'$"):
        strict.read()


def test_an_override_replaces_the_file(tmp_path: Path) -> None:
    model = source(tmp_path, CONFIG % "")
    assert model.read('{"backend": "identity", "max_batch_size": 7}').max_batch_size == 7
    with pytest.raises(BadConfig, match="Invalid config override"):
        model.read('{"no_such_field": 1}')


def test_a_fault_is_named_with_file_line_and_column(tmp_path: Path) -> None:
    model = source(tmp_path, 'backend: "identity"\nmax_batch_size: many\n')
    with pytest.raises(BadConfig, match=r"m/config\.pbtxt:2:17"):
        model.read()


def test_label_files_must_be_there_and_inside_of_the_models_folder(tmp_path: Path) -> None:
    good = source(tmp_path / "a", CONFIG % 'label_filename: "labels.txt"', files=("labels.txt",))
    good.prepare(good.read())
    absent = source(tmp_path / "b", CONFIG % 'label_filename: "labels.txt"')
    with pytest.raises(BadConfig, match="is not in the folder of model 'm'"):
        absent.prepare(absent.read())
    linked = source(tmp_path / "c", CONFIG % 'label_filename: "labels.txt"')
    os.symlink("/etc/passwd", tmp_path / "c" / "m" / "labels.txt")
    with pytest.raises(Unsupported, match="outside model directory"):
        linked.prepare(linked.read())


def test_device_instances_are_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    model = source(tmp_path, CONFIG % "" + "instance_group [{ kind: KIND_GPU }]")
    with pytest.raises(ServingError, match="has kind KIND_GPU but"):
        model.prepare(model.read())

"""What the start of a worker depends on is read from the configuration and the folder of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from google.protobuf import text_format

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import BadConfig
from kernel.repository.worker_needs import PreloadSet, WorkerNeeds, worker_needs

if TYPE_CHECKING:
    from pathlib import Path


def config(text: str = "") -> ModelConfig:
    return text_format.Parse(f'name: "m" backend: "python" {text}', ModelConfig())


def preload(value: str) -> str:
    return f'parameters {{ key: "naiad.preload" value {{ string_value: "{value}" }} }}'


def test_models_that_choose_nothing_have_equal_needs(tmp_path: Path) -> None:
    assert worker_needs(config(), str(tmp_path)) == WorkerNeeds("python", PreloadSet(), folder=str(tmp_path))


def test_modules_are_read_in_their_order(tmp_path: Path) -> None:
    needs = worker_needs(config(preload("torch, transformers.models")), str(tmp_path))
    assert needs.preload == PreloadSet(("torch", "transformers.models"))


@pytest.mark.parametrize("value", ["", "torch,", "a b", "import os", "torch;os", "./torch", "1x"])
def test_what_is_no_list_of_modules_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as failure:
        worker_needs(config(preload(value)), str(tmp_path))
    assert failure.value.message == (
        "parameter 'naiad.preload' of model 'm' must be names of modules with commas between, such as "
        f"'torch,transformers'; found '{value}'"
    )


def test_another_content_of_the_preload_file_is_another_set(tmp_path: Path) -> None:
    file = tmp_path / "preload.py"
    file.write_text("import json")
    first = worker_needs(config(), str(tmp_path)).preload
    assert first.file == str(file)
    assert worker_needs(config(), str(tmp_path)).preload == first
    file.write_text("import csv")
    assert worker_needs(config(), str(tmp_path)).preload != first


def test_a_folder_is_no_preload_file(tmp_path: Path) -> None:
    (tmp_path / "preload.py").mkdir()
    assert worker_needs(config(), str(tmp_path)).preload == PreloadSet()


def test_a_group_of_instances_on_gpus_makes_the_needs_those_of_a_gpu(tmp_path: Path) -> None:
    groups = "instance_group [{ kind: KIND_CPU }, { kind: KIND_GPU }]"
    assert worker_needs(config(groups), str(tmp_path)).gpu

"""Authors name a folder of models, or the folder of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.errors import BadOption
from kernel.tools.target import Target, find_target, model_target

if TYPE_CHECKING:
    from pathlib import Path

STEP = 'ensemble_scheduling { step [ { model_name: "%s" model_version: -1 } ] }'


def write(path: Path, config: str | None = "") -> None:
    (path / "1").mkdir(parents=True)
    (path / "1" / "model.onnx").touch()
    if config is not None:
        (path / "config.pbtxt").write_text(config)


@pytest.mark.parametrize("config", ["", None])
def test_a_models_folder_has_a_configuration_or_versions(tmp_path: Path, config: str | None) -> None:
    write(tmp_path / "models" / "a", config)
    assert find_target(tmp_path / "models") == Target(tmp_path / "models")
    assert find_target(tmp_path / "models" / "a") == Target(tmp_path / "models", "a")
    assert model_target(tmp_path / "models" / "a").name == "a"


def test_a_repository_of_models_with_numbers_as_names_is_none(tmp_path: Path) -> None:
    write(tmp_path / "1", None)
    assert find_target(tmp_path) == Target(tmp_path)


def test_the_models_of_the_steps_are_listed_with_an_ensemble(tmp_path: Path) -> None:
    write(tmp_path / "outer", STEP % "inner")
    write(tmp_path / "inner", STEP % "leaf")
    write(tmp_path / "leaf")
    write(tmp_path / "other")
    assert set(Target(tmp_path, "outer").scan().models) == {"outer", "inner", "leaf"}
    assert set(Target(tmp_path, "leaf").scan().models) == {"leaf"}
    assert len(Target(tmp_path).scan().models) == 4


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="is not the folder of a model: there is no config.pbtxt and no version$"):
        model_target(tmp_path)
    with pytest.raises(BadOption, match="is not a folder"):
        find_target(tmp_path / "nothing")

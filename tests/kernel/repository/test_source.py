"""A model's configuration, from its folder to the forms that workers and requests use.

Changes that a serving version can adopt, and changes that need a reload.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.gpus import NO_GPUS
from kernel.config.load import from_pbtxt
from kernel.config.to_text import to_json
from kernel.errors import BadConfig, InternalError, NotFound, ServingError, Unsupported
from kernel.repository.layout import Entry, ModelFolder, model_folder
from kernel.repository.source import (
    ModelSource,
    Origin,
    available_versions,
    choose_versions,
    missing_versions,
    scan,
    with_changes,
)

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


def folder(**modified_ns: int) -> ModelFolder:
    """Return a listing of `/r/m` with two versions. All times are 1 ns, except those in `modified_ns` by name."""
    files = {"config.pbtxt": False, "labels.txt": False, "configs": True, "1": True, "2": True}
    children = [Entry(name, is_folder=is_folder, modified_ns=1) for name, is_folder in files.items()]
    for name, time_ns in modified_ns.items():
        index = list(files).index(name.removeprefix("v").replace("_", "."))
        children[index] = Entry(children[index].name, is_folder=children[index].is_folder, modified_ns=time_ns)
    return model_folder("/r", Entry("m", is_folder=True, children=tuple(children)))


def config(count: int = 1, versions: int = 1, max_batch_size: int = 0) -> ModelConfig:
    made = ModelConfig(name="m", max_batch_size=max_batch_size)
    made.instance_group.add(name="m_0", count=count)
    made.version_policy.latest.num_versions = versions
    made.parameters["a"].string_value = "b"
    return made


BEFORE = Origin(folder(), config(), "/r/m/config.pbtxt")


@pytest.mark.parametrize(
    ("now", "needed"),
    [
        (BEFORE, False),
        (Origin(folder(config_pbtxt=2), config(count=3), "/r/m/config.pbtxt"), False),
        (Origin(folder(), config(versions=2), "/r/m/config.pbtxt"), False),
        (Origin(folder(v2=2), config(), "/r/m/config.pbtxt"), False),
        (Origin(folder(v1=2), config(count=3), "/r/m/config.pbtxt"), True),
        (Origin(folder(labels_txt=2), config(), "/r/m/config.pbtxt"), True),
        (Origin(folder(configs=2), config(), "/r/m/config.pbtxt"), True),
        (Origin(folder(), config(max_batch_size=2), "/r/m/config.pbtxt"), True),
        (Origin(model_folder("/other", BEFORE.folder.entry), config(), "/other/m/config.pbtxt"), True),
    ],
    ids=[
        "nothing", "instances", "the version policy", "another version", "the version", "labels",
        "alternative configurations", "the batch size", "another repository",
    ],
)  # fmt: skip
def test_a_version_is_reloaded_after_changes_of_its_files_or_settings(now: Origin, needed: bool) -> None:
    assert BEFORE.needs_reload(now, 1) == needed


def test_a_change_of_the_selected_configuration_file_alone_needs_no_reload() -> None:
    before = Origin(folder(), config(), "/r/m/configs/fast.pbtxt")
    assert not before.needs_reload(Origin(folder(configs=2), config(count=2), "/r/m/configs/fast.pbtxt"), 1)
    assert before.needs_reload(Origin(folder(config_pbtxt=2), config(), "/r/m/configs/fast.pbtxt"), 1)


def test_changes_keep_the_completed_fields() -> None:
    completed = config(max_batch_size=4)
    changed = with_changes(completed, config(count=3, versions=2))
    assert changed == config(count=3, versions=2, max_batch_size=4)
    assert completed == config(max_batch_size=4)


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ("latest { num_versions: 1 }", [10]),
        ("latest { num_versions: 2 }", [3, 10]),
        ("latest { num_versions: 9 }", [1, 3, 10]),
        ("all {}", [1, 3, 10]),
        ("specific { versions: [3, 1, 7] }", [1, 3]),
        ("specific { versions: [10, 10] }", [10]),
    ],
)
def test_the_policy_selects_among_the_available_versions(policy: str, chosen: list[int]) -> None:
    config = from_pbtxt(f"version_policy {{ {policy} }}".encode(), "")
    assert choose_versions(config, [10, 1, 3]) == chosen


@pytest.mark.parametrize(
    ("policy", "available"),
    [
        ("latest { num_versions: 1 }", []),
        ("latest { num_versions: 0 }", [1]),
        ("all {}", []),
        ("specific { versions: [9] }", [1]),
        ("specific {}", [1]),
    ],
)
def test_a_policy_without_an_available_version_is_an_error(policy: str, available: list[int]) -> None:
    config = from_pbtxt(f'name: "m" version_policy {{ {policy} }}'.encode(), "")
    with pytest.raises(BadConfig) as caught:
        choose_versions(config, available)
    assert caught.value.message == ("at least one version must be available under the version policy of model 'm'")


def test_absent_versions_that_the_policy_names_cause_warnings() -> None:
    config = from_pbtxt(b'name: "m" version_policy { specific { versions: [9, 1, 2, 9] } }', "")
    assert missing_versions(config, [1]) == [
        "version 2 is specified for model 'm', but the version directory is not present",
        "version 9 is specified for model 'm', but the version directory is not present",
    ]
    assert missing_versions(from_pbtxt(b"version_policy { all {} }", ""), []) == []


@pytest.mark.parametrize(
    ("config", "found", "available"),
    [
        ("ensemble_scheduling {}", [], [1]),
        ("ensemble_scheduling {} version_policy { specific { versions: [3, 5] } }", [], [3, 5]),
        ("ensemble_scheduling {}", [2], [2]),
        ("", [], []),
    ],
)
def test_an_ensemble_without_a_folder_of_a_version_has_one(config: str, found: list[int], available: list[int]) -> None:
    assert list(available_versions(from_pbtxt(config.encode(), ""), found)) == available

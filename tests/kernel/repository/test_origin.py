"""Changes that a serving version can adopt, and changes that need a reload."""

from __future__ import annotations

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.repository.layout import Entry, ModelFolder, model_folder
from kernel.repository.origin import Origin, with_changes


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

"""Several repositories, namespaces, and changes in the folders while the server runs.

Traffic rules beside the configurations of models.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InternalError, InvalidArgument, ModelLoadFailed, ServingError, Unavailable
from kernel.repository.layout import Entry, find_models, without_traffic
from kernel.repository.repositories import TrafficFiles
from kernel.repository.settings import LifecycleSettings
from kernel.serving.catalog import IndexItem
from schedulers.direct import direct
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, settled

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.repository.ensembles import LoadRequest
    from kernel.repository.layout import ModelFolder


def two_repositories(root: Path, **settings: Any) -> tuple[RepositoryLab, RepositoryLab]:
    """Return a lab with two repositories that both have model `m`, and a lab that only writes to the second."""
    first, second = root / "first", root / "second"
    for folder in (first, second):
        folder.mkdir()
    lab = RepositoryLab(first, direct, LifecycleSettings((first, second), **settings))
    lab.write("m")
    other = RepositoryLab(second, direct)
    other.write("m")
    other.write("n")
    return lab, other


def test_a_model_in_two_repositories_is_not_loaded(tmp_path: Path) -> None:
    lab, _ = two_repositories(tmp_path)

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == ["m"]
        assert await lab.lifecycle.index(ready=True) == [
            IndexItem("m", "", "UNAVAILABLE", "model appears in two or more repositories"),
            IndexItem("n", "1", "READY"),
        ]

    run(lab, scenario)


def test_a_duplicate_model_does_not_prevent_the_load_of_others(tmp_path: Path) -> None:
    lab, _ = two_repositories(tmp_path, explicit=True)

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start(["n"]) == []
        with pytest.raises(InternalError, match="^failed to load 'm', failed to poll from model repository$"):
            await lab.lifecycle.load("m")

    run(lab, scenario)


def test_with_namespacing_both_models_load_and_their_common_name_is_ambiguous(tmp_path: Path) -> None:
    lab, other = two_repositories(tmp_path, explicit=True, namespacing=True)

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        assert [(item.name, item.state) for item in await lab.lifecycle.index()] == [
            ("m", "READY"), ("m", "READY"), ("n", ""),
        ]  # fmt: skip
        with pytest.raises(InvalidArgument, match="^There are 2 identifiers of model 'm' in global map"):
            lab.catalog.resolve("m")
        other.fail("m", 1, "no luck")
        (tmp_path / "first" / "m" / "1" / "new").touch()
        with pytest.raises(ModelLoadFailed) as caught:
            await lab.lifecycle.load("m")
        assert caught.value.message == (
            f"load failed for model '{tmp_path}/second::m': version 1 is at UNAVAILABLE state: Internal: no luck;\n"
        )
        await lab.lifecycle.unload("m")
        await settled()
        assert lab.alive == []
        await lab.lifecycle.load("n")
        assert lab.catalog.resolve("n").spec.namespace == str(tmp_path / "second")

    run(lab, scenario)


def test_the_index_shows_the_current_content_of_the_repository(lab: RepositoryLab) -> None:
    async def scenario(lab: RepositoryLab) -> None:
        lab.write("new")
        assert await lab.lifecycle.index() == [IndexItem("new")]
        shutil.rmtree(lab.root / "new")
        assert await lab.lifecycle.index() == []

    run(lab, scenario)


# ---- poll mode ------------------------------------------------------------------------------


def test_polling_loads_new_and_changed_models_and_unloads_removed_ones(tmp_path: Path) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("kept")
    lab.write("gone")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        kept, keepers = lab.catalog.resolve("kept"), len(lab.keepers)
        await lab.lifecycle.polling.once()
        assert len(lab.keepers) == keepers, "an unchanged model was loaded again"
        shutil.rmtree(tmp_path / "gone")
        lab.write("new")
        lab.write("kept", (1, 2))
        await lab.lifecycle.polling.once()
        await settled()
        assert lab.catalog.resolve("kept").version == 2
        assert lab.catalog.resolve("kept") is not kept
        assert [(item.name, item.state) for item in lab.catalog.index()] == [
            ("kept", "UNAVAILABLE"), ("kept", "READY"), ("new", "READY"),
        ]  # fmt: skip
        with pytest.raises(Unavailable):
            await lab.lifecycle.load("new")

    run(lab, scenario)


def test_a_poll_loads_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    for name in ("a", "b", "c"):
        lab.write(name)
    loads: list[str] = []

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        load_model = lab.lifecycle.load_model

        async def noted(folder: ModelFolder, request: LoadRequest) -> None:
            loads.append(folder.name)
            await load_model(folder, request)

        monkeypatch.setattr(lab.lifecycle, "load_model", noted)
        lab.write("b", (1, 2))
        for _ in range(3):
            await lab.lifecycle.polling.once()
        assert loads == ["b"]

    run(lab, scenario)


def test_files_that_are_as_before_a_failed_load_again_end_the_report_of_it(tmp_path: Path) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("m")
    config = tmp_path / "m" / "config.pbtxt"
    status = config.stat()

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        lab.write("m", config="max_batch_size: many")
        await lab.lifecycle.polling.once()
        [item] = lab.catalog.index()
        assert item.reason.startswith("newer files could not be loaded")
        lab.write("m")
        os.utime(config, ns=(status.st_atime_ns, status.st_mtime_ns))
        await lab.lifecycle.polling.once()
        [item] = lab.catalog.index()
        assert item.reason == ""

    run(lab, scenario)


def test_index_and_log_say_that_newer_files_could_not_be_loaded_until_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("m")

    def index() -> list[tuple[str, str]]:
        return [(item.state, item.reason.partition("'")[0]) for item in lab.catalog.index()]

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        assert index() == [("READY", "")]
        lab.write("m", config="max_batch_size: many")
        await lab.lifecycle.polling.once()
        reason = "newer files could not be loaded: Invalid argument: failed to read text proto from "
        assert [(state, text[: len(reason)]) for state, text in index()] == [("READY", reason)]
        assert "model 'm' continues to serve with the files that it was loaded from" in caplog.text
        caplog.clear()
        lab.write("m", config=CONFIG)
        await lab.lifecycle.polling.once()
        assert index() == [("READY", "")]
        assert "continues to serve" not in caplog.text

    run(lab, scenario)


def test_polling_does_not_try_the_same_broken_files_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), poll_s=3600))
    lab.write("m", config="max_batch_size: many")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        for _ in range(3):
            await lab.lifecycle.polling.once()
        assert sum("failed to load 'm'" in message for message in caplog.messages) == 1
        lab.write("m", config=CONFIG)
        await lab.lifecycle.polling.once()
        assert lab.catalog.resolve("m").ready

    run(lab, scenario)


def test_when_polling_finds_a_broken_configuration_the_old_version_still_serves(tmp_path: Path) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        serving = lab.catalog.resolve("m")
        lab.write("m", config="max_batch_size: many")
        await lab.lifecycle.polling.once()
        assert lab.catalog.resolve("m") is serving
        lab.write("m", config=CONFIG + "max_batch_size: 2")
        await lab.lifecycle.polling.once()
        assert lab.catalog.resolve("m").spec.max_batch_size == 2

    run(lab, scenario)


CONFIG_ENTRY = Entry("config.pbtxt", modified_ns=5)

VERSION = Entry("1", is_folder=True, modified_ns=3)


def listing(*children: Entry) -> Entry:
    newest = max(child.modified_ns for child in children)
    return Entry("m", is_folder=True, modified_ns=newest, children=children)


def rule(modified_ns: int) -> Entry:
    return Entry("traffic.toml", modified_ns=modified_ns)


class Rules:
    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes | None, ServingError | None]] = []

    def set_file(self, name: str, text: bytes | None, error: ServingError | None = None) -> None:
        self.seen.append((name, text, error))

    def may_fail(self, name: str, version: int) -> bool:
        return False

    def kept_versions(self, name: str) -> set[int]:
        return {1, 2}


def test_a_changed_rule_does_not_change_the_model() -> None:
    bare = find_models({"/r": [listing(CONFIG_ENTRY, VERSION)]})
    for time_ns in (9, 10):
        found = find_models({"/r": [listing(CONFIG_ENTRY, VERSION, rule(time_ns))]})
        assert found.models == bare.models
        assert found.traffic["m"].path == "/r/m/traffic.toml"
        assert found.traffic["m"].entry.modified_ns == time_ns
    assert without_traffic(listing(CONFIG_ENTRY)) == listing(CONFIG_ENTRY)


def test_a_folder_of_that_name_is_no_rule() -> None:
    folder = Entry("traffic.toml", is_folder=True)
    assert find_models({"/r": [listing(CONFIG_ENTRY, folder)]}).traffic == {}


def test_each_rule_is_read_when_it_is_new_or_changed_and_dropped_when_it_is_gone() -> None:
    contents = {"/r/m/traffic.toml": b"one"}
    files, rules = TrafficFiles(contents.__getitem__), Rules()

    async def main() -> None:
        await files.read(find_models({"/r": [listing(CONFIG_ENTRY, rule(1))]}))  # nothing uses it yet
        files.rules = rules
        for _ in range(2):
            await files.read(find_models({"/r": [listing(CONFIG_ENTRY, rule(1))]}))
        contents["/r/m/traffic.toml"] = b"two"
        await files.read(find_models({"/r": [listing(CONFIG_ENTRY, rule(2))]}), ["m"])
        await files.read(find_models({"/r": []}), ["other"])
        for _ in range(2):
            await files.read(find_models({"/r": [listing(CONFIG_ENTRY)]}))

    asyncio.run(main())
    assert rules.seen == [("m", b"one", None), ("m", b"two", None), ("m", None, None)]


def test_a_rule_that_cannot_be_read_is_tried_again() -> None:
    error = InternalError("failed to read it")

    def read(path: str) -> bytes:
        if not rules.seen:
            raise error
        return b"now"

    files, rules = TrafficFiles(read), Rules()
    files.rules = rules

    async def main() -> None:
        for _ in range(2):
            await files.read(find_models({"/r": [listing(CONFIG_ENTRY, rule(1))]}))

    asyncio.run(main())
    assert rules.seen == [("m", None, error), ("m", b"now", None)]


def test_a_version_that_a_rule_names_is_loaded_beside_those_of_the_policy() -> None:
    files = TrafficFiles(dict[str, bytes]().__getitem__)
    assert files.versions("m", [3], (1, 3)) == [3]
    files.rules = Rules()
    assert files.versions("m", [3], (1, 3)) == [1, 3], "version 2 is not there"

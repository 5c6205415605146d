"""Whatever is wrong with one model, it is that model's failure: the others load, and polls go on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kernel.repository import ensembles
from kernel.repository.loading import VersionLoader
from kernel.repository.settings import LifecycleSettings
from kernel.repository.source import ModelSource
from schedulers.direct import direct
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, settled, until

if TYPE_CHECKING:
    from pathlib import Path

#: Numbers that protobuf refuses with exceptions of its own, and with Python's.
OUT_OF_RANGE = CONFIG.replace("TYPE_FP32", "99999999999999999999")


class Unexpected(Exception):
    """No code expects it."""


def states(lab: RepositoryLab) -> dict[str, str]:
    return {item.name: item.state for item in lab.catalog.index()}


def reason_of(lab: RepositoryLab, name: str) -> str:
    return next(item.reason for item in lab.catalog.index() if item.name == name)


@pytest.mark.parametrize("explicit", [False, True])
def test_an_enum_out_of_range_fails_its_model_only(tmp_path: Path, explicit: bool) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), explicit=explicit))
    lab.write("bad", config=OUT_OF_RANGE)
    lab.write("good")

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start(["*"]) == ["bad"]
        assert states(lab)["good"] == "READY"
        assert "config.pbtxt:3:" in reason_of(lab, "bad")
        assert "Value out of range: 99999999999999999999" in reason_of(lab, "bad")

    run(lab, scenario)


def test_polls_go_on_after_an_enum_out_of_range(tmp_path: Path) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), poll_s=0.001))
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == []
        lab.write("bad", config=OUT_OF_RANGE)
        await until(lambda: "bad" in states(lab))
        lab.write("new")
        await until(lambda: states(lab).get("new") == "READY")

    run(lab, scenario)


def test_a_folder_whose_name_is_not_utf8_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("m")
    os.makedirs(os.fsencode(tmp_path) + b"/bad\xff/1")

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == []
        assert await lab.lifecycle.index() == lab.catalog.index()
        assert list(states(lab)) == ["m"]
        assert "bad\\udcff' is ignored: its name is not UTF-8" in caplog.text
        caplog.text.encode()
        await lab.lifecycle.polling.once()

    run(lab, scenario)


def test_files_whose_names_are_not_utf8_are_files_of_a_model_like_others(tmp_path: Path) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("m")
    for name in (b"/m/1/weights\xff", b"/m/file\xff"):
        with open(os.fsencode(tmp_path) + name, "wb") as file:
            file.write(b"x")

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == []
        assert states(lab) == {"m": "READY"}

    run(lab, scenario)


@pytest.mark.parametrize("step", ["parse", "check", "versions"])
def test_any_exception_of_one_model_fails_that_model_and_is_logged(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    for name in ("bad", "good"):
        lab.write(name)
    unchanged = getattr(ModelSource, step)

    def failing(source: ModelSource, *args: object) -> object:
        if source.name == "bad":
            raise Unexpected("of a library")
        return unchanged(source, *args)

    monkeypatch.setattr(ModelSource, step, failing)

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == ["bad"]
        assert states(lab)["good"] == "READY"
        assert reason_of(lab, "bad") == "Internal: unexpected Unexpected: of a library"
        assert "Unexpected: of a library" in caplog.text
        lab.write("new")
        await lab.lifecycle.polling.once()
        assert states(lab)["new"] == "READY"

    run(lab, scenario)


def test_any_exception_of_one_version_fails_that_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    for name in ("bad", "good"):
        lab.write(name)
    load = VersionLoader.load

    async def failing(loader: VersionLoader, source: ModelSource, *args: object) -> object:
        if source.name == "bad":
            raise Unexpected("of a library")
        return await load(loader, source, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(VersionLoader, "load", failing)

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == ["bad"]
        assert states(lab)["good"] == "READY"
        assert reason_of(lab, "bad") == "Internal: unexpected Unexpected: of a library"

    run(lab, scenario)


def test_any_exception_while_ensembles_are_looked_for_is_of_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,)))
    lab.write("named", config=CONFIG + "# ensemble")
    lab.write("good")

    def failing(text: bytes | None, source: str) -> object:
        raise Unexpected("of a library")

    monkeypatch.setattr(ensembles, "from_pbtxt", failing)

    async def scenario(lab: RepositoryLab) -> None:
        assert await lab.lifecycle.start() == []
        assert states(lab) == {"named": "READY", "good": "READY"}

    run(lab, scenario)


def test_a_poll_that_fails_unexpectedly_is_logged_counted_shown_and_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), poll_s=0.001))
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        lifecycle = lab.lifecycle
        before = lifecycle.figures().background_failures
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle.repositories.repositories[0], "list_entries", failing_listing)
            await until(lambda: lifecycle.figures().background_failures >= before + 2)
            assert lifecycle.polling.trouble() == (
                "The last poll of the model repositories has failed: unexpected Unexpected"
            )
            assert "the poll of the repositories has failed and begins again in 0.001 s" in caplog.text
            assert "Unexpected: of a library" in caplog.text
        lab.write("new")
        await until(lambda: states(lab).get("new") == "READY")
        await until(lambda: lifecycle.polling.trouble() == "")
        assert lifecycle.polling.succeeded_s is not None

    run(lab, scenario)


async def failing_listing(only: str = "") -> object:
    raise Unexpected("of a library")


def test_repositories_that_cannot_be_read_are_shown_until_they_can(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    lab = RepositoryLab(root, direct, LifecycleSettings((root,)))
    lab.write("m")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.start()
        root.rename(tmp_path / "away")
        await lab.lifecycle.polling.once()
        assert lab.lifecycle.polling.trouble().endswith(f"failed to read model repository '{root}': no such directory")
        assert states(lab) == {"m": "READY"}
        (tmp_path / "away").rename(root)
        await lab.lifecycle.polling.once()
        assert lab.lifecycle.polling.trouble() == ""
        await settled()

    run(lab, scenario)

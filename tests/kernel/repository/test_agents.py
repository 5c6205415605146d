"""The actions of repository agents around loads and unloads."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from typing import TYPE_CHECKING

import pytest

from kernel.errors import InternalError, ModelLoadFailed, ServingError
from kernel.extensions import REPOSITORY_AGENTS
from kernel.repository import agents, lifecycle
from kernel.repository.agents import AgentModel, RepositoryAgent
from kernel.repository.settings import LifecycleSettings
from schedulers.direct import direct
from tests.kernel.repository_lab import CONFIG, RepositoryLab, run, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The actions that were done: agent, model, action. Each test has lists of its own: a thread that is late, because its
#: action was given up, notes nothing in the next test.
done: list[str] = []
#: Those of them that raise.
failing: list[str] = []
#: The folders that agents have made.
folders: list[Path] = []


class Noting(RepositoryAgent):
    """Notes its actions. The parameter `copy` lets it load from a folder of its own."""

    def __init__(self, model: AgentModel) -> None:
        super().__init__(model)
        self.title = model.parameters.get("title", "agent")
        self.done, self.failing, self.folders = done, failing, folders

    def note(self, action: str) -> None:
        assert threading.current_thread() is not threading.main_thread()
        noted = f"{self.title} {action}"
        self.done.append(noted)
        if noted in self.failing:
            raise InternalError(f"{noted} failed")

    def load(self) -> Path | None:
        self.note("load")
        if "copy" not in self.model.parameters:
            return None
        folder = self.new_folder()
        self.folders.append(folder)
        (folder / "1").mkdir()
        (folder / "config.pbtxt").write_text(CONFIG + "max_batch_size: 3\n")
        return folder

    def load_complete(self) -> None:
        self.note("load_complete")

    def load_fail(self) -> None:
        self.note("load_fail")

    def unload(self) -> None:
        self.note("unload")

    def unload_complete(self) -> None:
        self.note("unload_complete")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global done, failing, folders
    done, failing, folders = [], [], []
    monkeypatch.setitem(agents.BUILT_IN, "noting", Noting)
    yield
    assert not any(folder.exists() for folder in folders), "folders of agents are removed"


def config_with(*agents: str) -> str:
    """Return a configuration with agents of these titles; `*` behind one lets it choose a folder of its own."""
    entries = []
    for title in agents:
        copies = '{ key: "copy" value: "" },' if title.endswith("*") else ""
        entries.append(f'{{ name: "noting" parameters [ {copies} {{ key: "title" value: "{title.rstrip("*")}" }} ] }}')
    return CONFIG + f"model_repository_agents {{ agents [ {', '.join(entries)} ] }}\n"


def test_agents_act_in_order_and_those_that_complete_in_the_opposite_order(lab: RepositoryLab) -> None:
    lab.write("m", (1, 2), config=config_with("a", "b") + "version_policy { all {} }")

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        assert done == ["a load", "b load", "b load_complete", "a load_complete"]
        done.clear()
        await lab.lifecycle.unload("m")
        await until(lambda: len(done) == 4)
        assert done == ["a unload", "b unload", "b unload_complete", "a unload_complete"]

    run(lab, scenario)


@pytest.mark.parametrize("fails", ["a load", "b load"])
def test_an_agent_that_raises_fails_the_load_and_all_are_told(lab: RepositoryLab, fails: str) -> None:
    lab.write("m", config=config_with("a", "b"))
    failing.append(fails)

    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(ServingError, match="failed to load 'm', failed to poll from model repository"):
            await lab.lifecycle.load("m")
        loads = ["a load"] if fails == "a load" else ["a load", "b load"]
        assert done == loads + [each.replace("load", "load_fail") for each in reversed(loads)]
        [item] = lab.catalog.index()
        assert item.reason == f"Internal: {fails} failed"

    run(lab, scenario)


def test_agents_are_told_of_a_load_that_fails_in_the_worker(lab: RepositoryLab) -> None:
    lab.write("m", config=config_with("a*"))
    lab.failure = "no luck"

    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(ServingError, match="no luck"):
            await lab.lifecycle.load("m")
        assert done == ["a load", "a load_fail"]

    run(lab, scenario)


def test_a_model_is_loaded_from_the_folder_that_an_agent_has_chosen(lab: RepositoryLab) -> None:
    lab.write("m", config=config_with("a*", "b"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m").spec.max_batch_size == 3
        [keeper] = lab.keepers
        assert keeper.plan is not None
        assert keeper.plan.model_dir == str(folders[0])
        assert folders[0].is_dir()

    run(lab, scenario)  # which ends the server
    assert done[-4:] == ["a unload", "b unload", "b unload_complete", "a unload_complete"]


def test_a_reload_has_new_agents_which_load_before_the_former_ones_unload(lab: RepositoryLab) -> None:
    lab.write("m", config=config_with("a"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        lab.write("m", config=config_with("b"))
        await lab.lifecycle.load("m")
        await until(lambda: len(done) == 6)
        assert done == ["a load", "a load_complete", "b load", "b load_complete", "a unload", "a unload_complete"]

    run(lab, scenario)


def test_a_version_that_stays_has_the_agents_of_the_newest_load(lab: RepositoryLab) -> None:
    lab.write("m", config=config_with("a"))

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        first = lab.catalog.resolve("m")
        lab.write("m", config=config_with("a") + "instance_group [{ count: 2 }]")
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m") is first
        await until(lambda: len(done) == 6)
        assert done[2:] == ["a load", "a load_complete", "a unload", "a unload_complete"]

    run(lab, scenario)
    assert done[6:] == ["a unload", "a unload_complete"]


def test_errors_after_the_load_are_only_logged(lab: RepositoryLab, caplog: pytest.LogCaptureFixture) -> None:
    lab.write("m", config=config_with("a"))
    failing.extend(["a load_complete", "a unload", "a unload_complete"])

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        assert lab.alive

    run(lab, scenario)
    assert done == ["a load", "a load_complete", "a unload", "a unload_complete"]
    assert "a repository agent of model 'm' failed in unload_complete" in caplog.text


def test_an_agent_that_takes_too_long_fails_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = RepositoryLab(tmp_path, direct, LifecycleSettings((tmp_path,), explicit=True, load_timeout_s=0.5))
    lab.write("m", config=config_with("a"))
    go_on = threading.Event()
    monkeypatch.setattr(Noting, "load", lambda agent: go_on.wait(60) and None)

    async def scenario(lab: RepositoryLab) -> None:
        try:
            with pytest.raises(ServingError):
                await lab.lifecycle.load("m")
        finally:
            go_on.set()
        [item] = lab.catalog.index()
        assert item.reason == "Internal: the repository agents were still loading after 0.5 s"

    run(lab, scenario)
    assert done == ["a load_fail"]


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The agents of `Noting` hang in `load` until the event is set. At least one does in each test."""
    go_on, ended = threading.Event(), threading.Event()

    def load(agent: Noting) -> None:
        agent.note("load")
        go_on.wait(60)
        agent.done.append("load has ended")
        ended.set()

    monkeypatch.setattr(Noting, "load", load)
    yield go_on
    go_on.set()
    assert ended.wait(60)


def test_an_unload_ends_a_load_whose_agent_hangs(
    lab: RepositoryLab, monkeypatch: pytest.MonkeyPatch, hangs: threading.Event
) -> None:
    monkeypatch.setattr(lifecycle, "UNLOAD_WAIT_S", 0)
    lab.write("m", config=config_with("a"))

    async def scenario(lab: RepositoryLab) -> None:
        loading = asyncio.ensure_future(lab.lifecycle.load("m"))
        await until(lambda: done == ["a load"])
        await lab.lifecycle.unload("m")
        with pytest.raises(ModelLoadFailed, match="the load was ended, because the model was unloaded meanwhile"):
            await loading
        assert done == ["a load", "a load_fail"]
        [item] = lab.catalog.index()
        assert item.reason == "Unavailable: the load was ended, because the model was unloaded meanwhile"
        hangs.set()
        await until(lambda: "load has ended" in done)
        await lab.lifecycle.load("m")
        assert lab.catalog.resolve("m").version == 1

    run(lab, scenario)


def test_a_server_ends_while_an_agent_hangs(lab: RepositoryLab, hangs: threading.Event) -> None:
    lab.write("m", config=config_with("a"))

    async def scenario(lab: RepositoryLab) -> None:
        loading = asyncio.ensure_future(lab.lifecycle.load("m"))
        await until(lambda: done == ["a load"])
        await lab.lifecycle.close()
        with pytest.raises(asyncio.CancelledError):
            await loading

    run(lab, scenario)  # the end of its event loop waits for no thread
    assert done == ["a load", "a load_fail"]


def test_an_action_that_does_not_end_keeps_nothing_else_from_ending(
    lab: RepositoryLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab.write("m", config=config_with("a", "b"))
    go_on = threading.Event()

    def unload(agent: Noting) -> None:
        agent.note("unload")
        if agent.title == "a":
            go_on.wait(60)

    monkeypatch.setattr(agents, "ACTION_TIMEOUT_S", 0.01)
    monkeypatch.setattr(Noting, "unload", unload)

    async def scenario(lab: RepositoryLab) -> None:
        await lab.lifecycle.load("m")
        await lab.lifecycle.unload("m")
        await until(lambda: "a unload_complete" in done)
        go_on.set()

    run(lab, scenario)
    assert "a repository agent of model 'm' has not finished unload within 0.01 s" in caplog.text


def test_an_agent_that_nobody_has_installed_fails_the_load(lab: RepositoryLab) -> None:
    lab.write("m", config=CONFIG + 'model_repository_agents { agents [ { name: "unknown" } ] }')

    async def scenario(lab: RepositoryLab) -> None:
        with pytest.raises(ServingError):
            await lab.lifecycle.load("m")
        [item] = lab.catalog.index()
        assert "there is no repository agent 'unknown'" in item.reason
        assert REPOSITORY_AGENTS in item.reason

    run(lab, scenario)


def checked(lab: RepositoryLab, key: str, value: str) -> str:
    """Load a model with a checksum. Returns why that failed; "" if it did not."""
    parameters = f'parameters [ {{ key: "{key}" value: "{value}" }} ]'
    lab.write("m", config=CONFIG + f'model_repository_agents {{ agents [ {{ name: "checksum" {parameters} }} ] }}')
    (lab.root / "m" / "1" / "weights").write_bytes(b"12345")
    found: list[str] = []

    async def scenario(lab: RepositoryLab) -> None:
        try:
            await lab.lifecycle.load("m")
        except ServingError:
            [item] = lab.catalog.index()
            found.append(item.reason)

    run(lab, scenario)
    return "".join(found)


@pytest.mark.parametrize("algorithm", ["MD5", "md5", "sha256", "SHA512"])
def test_a_model_whose_files_have_their_digests_is_loaded(lab: RepositoryLab, algorithm: str) -> None:
    assert checked(lab, f"{algorithm}:1/weights", hashlib.new(algorithm.lower(), b"12345").hexdigest()) == ""


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (
            "MD5:1/weights",
            "00",
            "Invalid argument: Mismatched MD5 hash for file 1/weights, expect: 00, got: "
            "827ccb0eea8a706c4c34a16891f84e7b",
        ),
        ("CRC:1/weights", "00", "Unsupported: Unsupported checksum algorithm: CRC"),
        ("weights", "00", "Invalid argument: failed to parse key: weights"),
        ("MD5:absent", "00", "Invalid argument: failed to open text file for read absent: No such file or directory"),
        ("MD5:../other", "00", "Invalid argument: file '../other' of a checksum is outside of the model's folder"),
    ],
)
def test_a_checksum_that_does_not_hold_fails_the_load_with_tritons_text(
    lab: RepositoryLab, key: str, value: str, reason: str
) -> None:
    assert checked(lab, key, value) == reason

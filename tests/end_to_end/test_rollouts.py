"""Guarded rollouts of a real server under load: every request gets one response, of one version, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess, wait_for
from kernel.traffic.route import bucket_of, seed_of
from tests.end_to_end.rollout_models import START, rollout, write, write_repository
from tests.end_to_end.traffic_models import ALL_VERSIONS, CONFIG, call, load

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_repository(tmp_path / "models")


def test_a_rollout_to_the_end_loads_the_version_and_keeps_the_former_one(repository: Path) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=m")
    with ServerProcess(repository, *flags) as server:
        write(repository, 4)
        call(server, "/v2/models/m/rollout", START)
        counts = asyncio.run(load(server, 16, until=lambda: rollout(server)["phase"] not in ("loading", "step")))
        status = rollout(server)
        assert status["phase"] == "done", status
        assert counts.keys() == {"3", "4"}, "no request has failed"
        states = [change["reason"] for change in call(server, "/v2/models/m/traffic")["history"]]
        assert sum("good enough" in each for each in states) >= 2
        page = server.get("/metrics", server.metrics_port)[1]
        assert 'naiad_traffic_rollout_phase{model="m",phase="done"} 1' in page
        # The policy of the model is `latest 1`; the former version still serves, and one command brings it back.
        command = [sys.executable, "-m", "kernel", "rollout"]
        shown = subprocess.run(
            [*command, "status", "m", "--url", server.url], capture_output=True, text=True, check=False
        )
        assert shown.returncode == 0
        assert "version 4 in place of 3: done" in shown.stdout
        subprocess.run([*command, "abort", "m", "--url", server.url], capture_output=True, check=True)
        after = asyncio.run(load(server, 4, until=lambda: True))
        assert after.keys() == {"3"}
        listed = subprocess.run(
            [*command, "history", "m", "--url", server.url], capture_output=True, text=True, check=True
        )
        assert {"127.0.0.1", "aborted"} <= set(re.findall(r"[\d.]+|\w+", listed.stdout)), "who, and what"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("failing", "errors: candidate "),
        ("crashing", ""),
        ("hanging", "the candidate has ended no execution for 2 s"),
        ("slow", "slow responses: candidate "),
        ("broken", "it has no weights"),
        ("wrong", "different outputs in "),
    ],
)
def test_a_bad_version_is_stopped_and_the_former_one_gets_all_requests_again(
    repository: Path, kind: str, reason: str
) -> None:
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=m") as server:
        write(repository, 4, kind)
        guards = {"slow": ["errors", "latency"], "wrong": ["errors", "outputs"]}.get(kind, ["errors"])
        start = {**START, "steps": [50, 100], "guards": guards}
        if kind == "hanging":
            start["hang_s"] = 2
        call(server, "/v2/models/m/rollout", start)
        counts = asyncio.run(load(server, 16, until=lambda: rollout(server)["phase"] == "aborted"))
        assert counts["3"] > 0
        assert reason in rollout(server)["reason"]
        after = asyncio.run(load(server, 16, until=lambda: True))
        assert after.keys() == {"3"}, "new requests follow the verdict at once"
        if kind == "broken":
            assert counts.keys() == {"3"}, "no client has noticed it"
        server.wait_for_log("version 4 gets 0 %, version 3 100 %")


def test_shares_of_a_step_are_those_of_independent_draws(repository: Path) -> None:
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=m") as server:
        write(repository, 4)
        call(server, "/v2/models/m/rollout", {**START, "every_s": 3600})
        wait_for(lambda: rollout(server)["phase"] == "step")
        counts = asyncio.run(load(server, 16, each=100))
        assert counts.total() == 1600, "each request has one response"
        assert abs(counts["4"] - 0.2 * 1600) < 4 * math.sqrt(1600 * 0.2 * 0.8)
        assert rollout(server)["step"] == 1


def test_a_user_changes_the_version_by_a_step_only_and_never_back(repository: Path) -> None:
    """3,040 users, each at one of 16 clients, so that the responses of a user come in the order of the requests."""
    seen: dict[str, list[str]] = {}

    def got(user: str, version: str) -> None:
        versions = seen.setdefault(user, [])
        if version not in versions[-1:]:
            versions.append(version)

    def user_of(number: int, turn: int) -> str:
        return f"user-{number}-{turn % 190}"

    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=m") as server:
        write(repository, 4)
        start = {**START, "steps": [30, 100], "key": "header:x-user"}
        call(server, "/v2/models/m/rollout", {**start, "every_s": 3600})
        wait_for(lambda: rollout(server)["phase"] == "step")
        asyncio.run(load(server, 16, each=60, user_of=user_of, got=got))
        for user, versions in seen.items():
            expected = "4" if bucket_of(user, seed_of("m", "")) < 3000 else "3"
            assert versions == [expected], "one version while the step is the same"
        call(server, "/v2/models/m/rollout/abort", {})
        seen.clear()
        call(server, "/v2/models/m/rollout", start)
        wait_for(lambda: rollout(server)["phase"] == "step")
        counts = asyncio.run(
            load(server, 16, until=lambda: rollout(server)["phase"] != "step", user_of=user_of, got=got)
        )
        assert rollout(server)["phase"] == "done", rollout(server)
        assert counts.keys() == {"3", "4"}
        assert asyncio.run(load(server, 16, each=190, user_of=user_of, got=got)).keys() == {"4"}
        assert {tuple(versions) for versions in seen.values()} == {("4",), ("3", "4")}


def test_a_version_that_a_poll_finds_gets_nothing_before_its_rollout(repository: Path, tmp_path: Path) -> None:
    (repository / "m" / "traffic.toml").write_text("labels = { stable = 3 }\nweights = { stable = 1 }\n")
    with ServerProcess(repository, "--model-control-mode=poll", "--repository-poll-secs=1") as server:
        write(tmp_path / "new", 4)
        os.rename(tmp_path / "new" / "m" / "4", repository / "m" / "4")
        server.wait_for_log("successfully loaded 'm' version 4")
        assert asyncio.run(load(server, 4, until=lambda: True)).keys() == {"3"}
        call(server, "/v2/models/m/rollout", START)
        asyncio.run(load(server, 8, until=lambda: rollout(server)["phase"] == "done"))
        assert asyncio.run(load(server, 4, until=lambda: True)).keys() == {"4"}


def test_a_version_that_a_poll_finds_is_rolled_out_by_the_rule_and_a_broken_one_costs_nothing(
    repository: Path, tmp_path: Path
) -> None:
    """Version 4 cannot be loaded, version 5 is good; nobody calls anything."""
    rule = "labels = { stable = 3 }\nweights = { stable = 1 }\n[rollout]\nautomatic = true\nevery_s = 0.2\n"
    rule += 'steps = [20, 100]\nleast_requests = 20\nguards = ["errors"]\n'
    (repository / "m" / "traffic.toml").write_text(rule)
    with ServerProcess(repository, "--model-control-mode=poll", "--repository-poll-secs=1") as server:
        write(tmp_path / "new", 4, "broken")
        os.rename(tmp_path / "new" / "m" / "4", repository / "m" / "4")
        server.wait_for_log("it has no weights")
        assert asyncio.run(load(server, 4, until=lambda: True)).keys() == {"3"}
        assert rollout(server) is None
        write(tmp_path / "new", 5)
        os.rename(tmp_path / "new" / "m" / "5", repository / "m" / "5")
        counts = asyncio.run(load(server, 8, until=lambda: (rollout(server) or {}).get("phase") == "done"))
        assert counts.keys() == {"3", "5"}, "no request has failed"
        assert rollout(server)["candidate"] == 5


def test_a_restart_with_a_candidate_that_cannot_be_loaded_stays_with_the_stable_version(
    repository: Path, tmp_path: Path
) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=m", f"--state-directory={tmp_path / 'state'}")
    with ServerProcess(repository, *flags) as server:
        write(repository, 4)
        call(server, "/v2/models/m/rollout", {**START, "every_s": 3600})
        asyncio.run(load(server, 4, until=lambda: rollout(server)["phase"] == "step"))
        wait_for_state(tmp_path / "state", 20)
        os.kill(server.pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            server.wait(60)
    (repository / "m" / "4" / "model.py").write_text("raise ValueError('it has no weights')")
    with ServerProcess(repository, *flags) as server:
        counts = asyncio.run(load(server, 4, until=lambda: rollout(server)["phase"] == "aborted"))
        assert counts.keys() == {"3"}
        assert "it has no weights" in rollout(server)["reason"]


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_server_that_is_killed_goes_on_where_it_was(repository: Path, tmp_path: Path, step: int) -> None:
    state = tmp_path / "state"
    flags = ("--model-control-mode=explicit", "--load-model=m", f"--state-directory={state}")
    write(repository, 4)

    def reached() -> bool:
        status = rollout(server)
        return bool(status["step"] >= step or status["phase"] == "done")

    # The policy serves version 4 from the start; the rollout names the stable version.
    (repository / "m" / "config.pbtxt").write_text(CONFIG + ALL_VERSIONS)
    with ServerProcess(repository, *flags) as server:
        start = {**START, "every_s": 0.2 if step < 4 else 0, "stable": 3, "steps": [20, 40, 60]}
        if step < 4:
            start["every_s"] = 0
        call(server, "/v2/models/m/rollout", start)
        if step == 4:
            call(server, "/v2/models/m/rollout/promote", {})
        else:
            asyncio.run(load(server, 8, until=reached))
        before = rollout(server)
        expected = str(before["candidate"])
        wanted = before["described"]
        wait_for_state(state, before["share"])
        os.kill(server.pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            server.wait(60)
    with ServerProcess(repository, *flags) as server:
        asyncio.run(load(server, 4, until=lambda: rollout(server)["phase"] != "loading"))
        after = rollout(server)
        assert (after["candidate"], after["stable"]) == (4, 3)
        assert after["phase"] in ("step", "done"), after
        if step == 4:
            assert (wanted, expected) == ("done", "4")
            assert asyncio.run(load(server, 4, until=lambda: True)).keys() == {"4"}
        else:
            assert after["share"] >= before["share"] or after["phase"] == "done"


@pytest.mark.parametrize("action", ["pause", "abort"])
def test_a_server_that_is_killed_while_its_rollout_is_paused_or_aborted_stays_so(
    repository: Path, tmp_path: Path, action: str
) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=m", f"--state-directory={tmp_path / 'state'}")
    write(repository, 4)
    (repository / "m" / "config.pbtxt").write_text(CONFIG + ALL_VERSIONS)
    phase = {"pause": "paused", "abort": "aborted"}[action]
    with ServerProcess(repository, *flags) as server:
        call(server, "/v2/models/m/rollout", {**START, "every_s": 3600, "stable": 3})
        wait_for(lambda: rollout(server)["phase"] == "step")
        call(server, f"/v2/models/m/rollout/{action}", {})
        file = tmp_path / "state" / "traffic.json"
        wait_for(lambda: file.exists() and f'"phase":"{phase}"' in file.read_text())  # a thread writes it
        os.kill(server.pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            server.wait(60)
    with ServerProcess(repository, *flags) as server:
        wait_for(lambda: rollout(server)["phase"] != "loading")
        found = rollout(server)
        assert (found["phase"], found["share"]) == (phase, {"pause": 20, "abort": 0}[action]), found
        counts = asyncio.run(load(server, 8, each=40))
        assert counts.keys() == ({"3", "4"} if action == "pause" else {"3"})
        if action == "pause":
            call(server, "/v2/models/m/rollout/resume", {})
            assert rollout(server)["phase"] == "step"


def wait_for_state(folder: Path, share: int) -> None:
    """Wait until the state file has a share: it is written by another thread."""

    def written() -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError):
            weights = json.loads((folder / "traffic.json").read_text())["m"]["rule"]["weights"]
            return bool(weights.get("canary", 100) >= share)
        return False

    wait_for(written)


def test_a_rule_of_a_client_outlives_the_server(repository: Path, tmp_path: Path) -> None:
    write(repository, 4)
    (repository / "m" / "config.pbtxt").write_text(CONFIG + ALL_VERSIONS)
    flag = f"--state-directory={tmp_path / 'state'}"
    with ServerProcess(repository, flag) as server:
        call(server, "/v2/models/m/traffic", {"weights": {"3": 1}})
    with ServerProcess(repository, flag) as server:
        assert asyncio.run(load(server, 4, until=lambda: True)).keys() == {"3"}
        assert call(server, "/v2/models/m/traffic")["source"] == "client"
    (tmp_path / "state" / "traffic.json").write_text("[]")
    with pytest.raises(Exception, match="is not what the server has written"), ServerProcess(repository, flag):
        pass


def test_wrong_rollouts_are_refused(repository: Path) -> None:
    with ServerProcess(repository) as server:
        for path, body, text in (
            ("rollout", {"to": 3}, "has no version below 3 that is READY: name the stable version"),
            ("rollout", {"to": 4, "guards": ["x"]}, "'x' is no guard"),
            ("rollout/abort", {}, "model 'm' has no rollout"),
        ):
            with pytest.raises(urllib.error.HTTPError) as raised:
                call(server, f"/v2/models/m/{path}", body)
            assert raised.value.code == 400
            assert text in raised.value.read().decode()
        assert rollout(server) is None

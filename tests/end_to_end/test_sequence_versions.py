"""Sequences keep their version and their instance: reload, removal, fewer instances, the end of the server."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess, wait_for
from tests.end_to_end.sequence_models import DIRECT, OLDEST, Client, accumulate, config, post

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

EXPLICIT = ("--model-control-mode=explicit", "--load-model=m")
both = pytest.mark.parametrize("strategy", [DIRECT, OLDEST], ids=["direct", "oldest"])


def add_version(repository: Path, version: int) -> None:
    folder = repository / "m" / str(version)
    # Without byte code: it counts as that of any file of the same size and the same second.
    shutil.copytree(repository / "m" / "1", folder, ignore=shutil.ignore_patterns("__pycache__"))
    source = (folder / "model.py").read_text()
    (folder / "model.py").write_text(source.replace("version=1", f"version={version}"))


@both
def test_a_new_version_gets_new_sequences_and_the_old_one_keeps_its_own(write_model: WriteModel, strategy: str) -> None:
    repository = write_model("m", config(strategy), accumulate())
    with ServerProcess(repository, *EXPLICIT) as server:
        old, new = Client(server, "m", 1), Client(server, "m", 2)
        assert old.send(10, start=True) == 10
        add_version(repository, 2)
        assert post(server, "/v2/repository/models/m/load") == (200, "")
        assert new.send(1, start=True) == 1
        assert new.info["version"] == 2
        for total in (20, 30):
            assert old.send(10) == total
            assert old.info["version"] == 1
        assert Client(server, "m", 3).send(1) is None
        assert old.send(10, end=True) == 40
        assert old.send(5, start=True) == 5
        assert old.info["version"] == 2, "the id begins again in the new version"
        wait_for(lambda: len(server.workers("m")) == 1)
        assert new.send(1, end=True) == 2
        assert old.send(1, end=True) == 6


def test_the_same_version_loaded_again_keeps_its_sequences_until_they_are_idle(write_model: WriteModel) -> None:
    repository = write_model("m", config(DIRECT, idle_us=6_000_000), accumulate())
    with ServerProcess(repository, *EXPLICIT) as server:
        client = Client(server, "m", 1)
        assert client.send(10, start=True) == 10
        before = client.info["pid"]
        model = repository / "m" / "1" / "model.py"
        model.write_text(model.read_text() + "\n# changed\n")
        assert post(server, "/v2/repository/models/m/load") == (200, "")
        assert client.send(1) == 11
        assert client.info["pid"] == before
        wait_for(lambda: before not in server.workers("m"))
        assert client.send(1) is None
        assert "START flag" in client.error


def test_an_unloaded_model_finishes_its_sequences_and_begins_none(write_model: WriteModel) -> None:
    with ServerProcess(write_model("m", config(OLDEST), accumulate()), *EXPLICIT) as server:
        client = Client(server, "m", 1)
        assert client.send(10, start=True) == 10
        assert post(server, "/v2/repository/models/m/unload") == (200, "")
        assert Client(server, "m", 2).send(1, start=True) is None
        other = Client(server, "m", 2)
        other.send(1, start=True)
        assert (other.status, other.error) == (
            503,
            "Request for unknown model: 'm' version 1 is not at ready state",
        )
        assert server.get("/v2/models/m")[0] == 404
        assert server.get("/v2/models/m/ready")[0] != 200
        assert client.send(5) == 15
        assert client.send(5, end=True) == 20
        wait_for(lambda: not server.workers("m"))
        assert client.send(1, start=True) is None
        assert "no available versions" in client.error


def test_sequences_of_an_unloaded_version_end_at_the_limit(write_model: WriteModel) -> None:
    flags = (*EXPLICIT, "--model-unload-timeout-secs=1")
    with ServerProcess(write_model("m", config(DIRECT, idle_us=60_000_000), accumulate()), *flags) as server:
        client = Client(server, "m", 1)
        assert client.send(10, start=True) == 10
        assert post(server, "/v2/repository/models/m/unload") == (200, "")
        wait_for(lambda: not server.workers("m"))
        server.wait_for_log("0 requests and 1 sequences have not finished within 1 s")
        assert client.send(1) is None


def test_an_instance_that_is_removed_keeps_its_sequences_until_they_end(write_model: WriteModel) -> None:
    repository = write_model("m", config(DIRECT, count=2), accumulate())
    with ServerProcess(repository, *EXPLICIT) as server:
        clients = [Client(server, "m", number) for number in (1, 2)]
        for client in clients:
            assert client.send(1, start=True) == 1
        pids = [client.info["pid"] for client in clients]
        text = (repository / "m" / "config.pbtxt").read_text()
        (repository / "m" / "config.pbtxt").write_text(text.replace("count: 2", "count: 1"))
        assert post(server, "/v2/repository/models/m/load") == (200, "")
        others = [Client(server, "m", number) for number in (3, 4)]
        for client in others:
            assert client.send(1, start=True) == 1
        assert len({client.info["pid"] for client in others}) == 1, "new sequences begin in the instance that stays"
        for client, pid in zip(clients, pids, strict=True):
            assert client.send(1) == 2
            assert client.info["pid"] == pid
        for client in clients:
            assert client.send(1, end=True) == 3
        wait_for(lambda: len(server.workers("m")) == 1)
        assert [client.send(1, end=True) for client in others] == [2, 2]


def test_a_server_that_stops_finishes_requests_and_does_not_wait_for_idle_sequences(write_model: WriteModel) -> None:
    repository = write_model("m", config(OLDEST, idle_us=60_000_000), accumulate())
    with ServerProcess(repository) as server:
        client = Client(server, "m", 1)
        assert client.send(1, start=True) == 1
        assert Client(server, "m", 2).send(1, start=True) == 1
        found: list[int | None] = []
        thread = threading.Thread(target=lambda: found.append(client.send(-3000)))
        thread.start()
        wait_for(lambda: 'naiad_inference_in_flight_requests{model="m",version="1"} 1' in metrics(server))
        server.terminate()
        thread.join(60)
        assert found == [1]
        assert server.wait() == 0
        server.wait_for_log("every accepted request got its response")


def metrics(server: ServerProcess) -> str:
    return server.get("/metrics", server.metrics_port)[1]

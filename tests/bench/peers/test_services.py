"""The files that peers are given, and which of them can be chosen."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from bench.peers import peer
from bench.peers.measurement import PEERS, chosen, worker_counts
from bench.peers.peer import NotInstalled, PeerServer, Setup, environment
from bench.peers.servers.trees import TREE_PEERS
from bench.peers.serving import serving

if TYPE_CHECKING:
    from pathlib import Path

ALL = [*PEERS, *TREE_PEERS]
SERVICES = [peer for peer in ALL if peer.service is not None]


@pytest.fixture(autouse=True)
def trees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model of trees is not trained for the names of files."""
    monkeypatch.setattr("bench.peers.servers.trees.trees_model", lambda: tmp_path / "trees.json")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("peer", SERVICES, ids=lambda peer: peer.name)
def test_the_files_of_a_service_are_complete(peer: PeerServer, workers: int, tmp_path: Path) -> None:
    assert peer.service is not None
    service = peer.service(Setup(tmp_path, 12345, 12346, 12347, workers))
    everything = " ".join([*service.files.values(), *service.command])
    assert "12345" in everything
    for name, text in service.files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
        elif name.endswith(".json"):
            json.loads(text)
    for mark in ("@MODEL@", "@WORKERS@", "@PORT@", "@HTTP@", "@GRPC@", "@FOLDER@"):
        assert mark not in everything


@pytest.mark.parametrize("peer", SERVICES, ids=lambda peer: peer.name)
def test_the_number_of_workers_is_set(peer: PeerServer, tmp_path: Path) -> None:
    assert peer.service is not None
    one, three = (peer.service(Setup(tmp_path, 12345, 12346, 12347, workers)) for workers in (1, 3))
    assert (one.files, one.command) != (three.files, three.command)


@pytest.mark.parametrize("peer", ALL, ids=lambda peer: peer.name)
def test_every_peer_says_what_was_set_and_where_that_is_documented(peer: PeerServer) -> None:
    assert peer.settings
    assert peer.source
    assert (peer.service is None) == (not peer.requirements) == (peer.serve is not None)


def test_peers_are_chosen_by_a_part_of_their_names() -> None:
    assert [peer.name for peer in chosen("mosec")] == ["mosec"]
    assert [peer.name for peer in chosen("triton")] == ["triton"], "a whole name is that peer only"
    assert [peer.name for peer in chosen("trit")] == ["triton", "triton-onnx"]
    assert chosen("") == PEERS
    assert chosen("torchserve") == []


def test_one_worker_and_as_many_as_there_are_cores() -> None:
    assert worker_counts(3) == [3]
    assert worker_counts(None)[0] == 1
    assert worker_counts(None) == sorted(set(worker_counts(None)))


def failing(peer: PeerServer, requirement: str) -> PeerServer:
    return PeerServer("absent", "Absent", "", "", {}, requirements=(requirement,), service=peer.service)


def test_a_peer_that_cannot_be_installed_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "FOLDER", tmp_path)
    (tmp_path / "absent" / "bin").mkdir(parents=True)
    (tmp_path / "absent" / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(NotInstalled, match="ERROR: .*a/path/that/is/not/there"):
        environment(failing(SERVICES[0], "/a/path/that/is/not/there"))
    assert not (tmp_path / "absent" / "installed.json").exists()


def test_an_environment_that_is_there_is_taken_with_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "FOLDER", tmp_path)
    (tmp_path / "absent").mkdir()
    record = {"requirements": ["Some_Server[fast]"], "frozen": ["some-server==1.2", "numpy==2.0"]}
    (tmp_path / "absent" / "installed.json").write_text(json.dumps(record))
    found = environment(failing(SERVICES[0], "Some_Server[fast]"))
    assert found.versions == {"Some_Server": "1.2"}
    assert found.program("python") == str(tmp_path / "absent/bin/python")


def test_a_service_that_ends_is_reported_with_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "FOLDER", tmp_path)
    programs = tmp_path / "absent" / "bin"
    programs.mkdir(parents=True)
    record = {"requirements": ["absent"], "frozen": []}
    (tmp_path / "absent" / "installed.json").write_text(json.dumps(record))
    uvicorn = programs / "uvicorn"
    uvicorn.write_text("#!/bin/sh\necho no such event loop\nexit 3\n")
    uvicorn.chmod(0o755)
    fastapi = next(peer for peer in SERVICES if peer.name == "fastapi")
    broken = PeerServer(
        "absent", "Absent", "", "", fastapi.endpoints, requirements=("absent",), service=fastapi.service
    )
    with pytest.raises(NotInstalled, match="it has ended: no such event loop"), serving(broken, 1):
        pass

"""`kill -9` of the server, and of the worker of the candidate, while the candidate of a rollout loads.

The candidate says that it loads by a file with the id of its process, and goes on when another file is there: no test
depends on how long anything takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess, wait_for
from tests.end_to_end.rollout_models import CODE, START, rollout, write_repository
from tests.end_to_end.traffic_models import call, load

if TYPE_CHECKING:
    from collections.abc import Callable

#: Waits in `initialize`.
WAITING = CODE.replace(
    "{initialize}",
    """        import pathlib
        folder = pathlib.Path({folder!r})
        (folder / "new").write_text(str(os.getpid()))
        os.rename(folder / "new", folder / "loads")
        while not (folder / "go").exists():
            time.sleep(0.01)""",
).replace("{execute}", "            pass")

FLAGS = ("--model-control-mode=explicit", "--load-model=m")


class Candidate:
    """Version 4 of the model, which loads as long as the test wants."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.folder = folder
        self.version = repository / "m" / "4"
        folder.mkdir()

    def write(self) -> None:
        """Put it into the repository."""
        self.version.mkdir()
        (self.version / "model.py").write_text(WAITING.replace("{folder!r}", repr(str(self.folder))))

    def worker(self) -> int:
        """Wait until a process loads it, and return its id."""
        path = self.folder / "loads"
        wait_for(path.exists)
        pid = int(path.read_text())
        path.unlink()
        return pid

    def go_on(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_repository(tmp_path / "models")


@pytest.fixture
def candidate(repository: Path, tmp_path: Path) -> Candidate:
    return Candidate(repository, tmp_path / "candidate")


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def kept(state: Path) -> Any:
    """Return what the state file says of the rollout; it is replaced as a whole."""
    with contextlib.suppress(OSError):
        return json.loads((state / "traffic.json").read_text())["m"]["rollout"]
    return None


def kill(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGKILL)
    with contextlib.suppress(Exception):
        server.wait(30)


def until(server: ServerProcess, phase: str) -> Callable[[], bool]:
    return lambda: bool(rollout(server)["phase"] == phase)


def test_a_server_that_is_killed_while_the_candidate_loads_goes_on_with_its_load(
    repository: Path, candidate: Candidate, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with ServerProcess(repository, *FLAGS, f"--state-directory={state}") as server:
        candidate.write()
        call(server, "/v2/models/m/rollout", START)
        worker = candidate.worker()
        assert asyncio.run(load(server, 4, each=10)).keys() == {"3"}, "clients do not notice that it loads"
        wait_for(lambda: (kept(state) or {}).get("phase") == "loading")
        kill(server)
    wait_for(lambda: is_gone(worker))
    candidate.go_on()
    with ServerProcess(repository, *FLAGS, f"--state-directory={state}") as server:
        counts = asyncio.run(load(server, 8, until=until(server, "done")))
        assert counts.keys() == {"3", "4"}, "no request has failed"
        history = [change["reason"] for change in call(server, "/v2/models/m/traffic")["history"]]
        assert history[-1] == "started"
        assert "the candidate is READY" in history
    assert kept(state)["phase"] == "done"


def test_a_worker_that_is_killed_while_the_candidate_loads_ends_the_rollout(
    repository: Path, candidate: Candidate, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with ServerProcess(repository, *FLAGS, f"--state-directory={state}") as server:
        candidate.write()
        call(server, "/v2/models/m/rollout", START)
        os.kill(candidate.worker(), signal.SIGKILL)
        counts = asyncio.run(load(server, 8, until=until(server, "aborted")))
        assert counts.keys() == {"3"}, "no client has noticed it"
        reason = rollout(server)["reason"]
        assert reason.startswith("the candidate cannot be loaded: ")
        wait_for(lambda: (kept(state) or {}).get("phase") == "aborted")
        kill(server)
    assert kept(state)["reason"] == reason
    candidate.go_on()  # the next server can load it
    with ServerProcess(repository, *FLAGS, f"--state-directory={state}") as server:
        assert asyncio.run(load(server, 4, each=10)).keys() == {"3"}, "it was stopped"
        assert (rollout(server)["phase"], rollout(server)["reason"]) == ("aborted", reason)
        call(server, "/v2/models/m/rollout", START)
        counts = asyncio.run(load(server, 8, until=until(server, "done")))
        assert counts.keys() == {"3", "4"}, "a person may try it again"


def test_a_candidate_that_was_repaired_is_rolled_out_by_the_same_server(repository: Path, candidate: Candidate) -> None:
    """The reason why its last load has failed does not end the next rollout."""
    with ServerProcess(repository, *FLAGS) as server:
        candidate.write()
        call(server, "/v2/models/m/rollout", START)
        os.kill(candidate.worker(), signal.SIGKILL)
        wait_for(until(server, "aborted"))
        candidate.go_on()
        model = candidate.version / "model.py"
        model.write_text(model.read_text() + "# repaired\n")
        call(server, "/v2/models/m/rollout", START)
        counts = asyncio.run(load(server, 8, until=until(server, "done")))
        assert counts.keys() == {"3", "4"}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (FLAGS, "the repository has no version 9 of model 'm'"),
        ((), "with --model-control-mode=none the server loads versions only at its start"),
    ],
)
def test_a_version_that_is_not_there_ends_the_rollout_at_once(
    repository: Path, flags: tuple[str, ...], reason: str
) -> None:
    with ServerProcess(repository, *flags) as server:
        call(server, "/v2/models/m/rollout", {**START, "to": 9})
        wait_for(until(server, "aborted"))
        assert rollout(server)["reason"] == f"the candidate cannot be loaded: {reason}"


def test_a_server_that_starts_again_serves_the_stable_version_while_the_candidate_loads(
    repository: Path, candidate: Candidate, tmp_path: Path
) -> None:
    """The candidate may take minutes, or hang."""
    state = tmp_path / "state"
    with ServerProcess(repository, *FLAGS, f"--state-directory={state}") as server:
        candidate.write()
        call(server, "/v2/models/m/rollout", START)
        candidate.worker()
        wait_for(lambda: (kept(state) or {}).get("phase") == "loading")
        kill(server)
    with ServerProcess(repository, *FLAGS, f"--state-directory={state}") as server:
        candidate.worker()
        assert asyncio.run(load(server, 4, each=10)).keys() == {"3"}
        assert rollout(server)["phase"] == "loading"
        candidate.go_on()
        assert asyncio.run(load(server, 8, until=until(server, "done"))).keys() == {"3", "4"}

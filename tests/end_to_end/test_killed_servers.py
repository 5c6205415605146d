"""What is left of a server that was killed: no processes, and nothing that the next server does not remove."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

#: Faults have the same effects however workers are started.
pytestmark = pytest.mark.usefixtures("worker_start")

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""

# Starts a process in a process group of its own, and one in that of the worker; prints their numbers.
STARTS_PROCESSES = """
import subprocess, sys
WAITS = [sys.executable, "-S", "-c", "import signal; signal.pause()"]

class TritonPythonModel:
    def initialize(self, args):
        own = subprocess.Popen(WAITS, process_group=0)
        shared = subprocess.Popen(WAITS)
        print("started", own.pid, shared.pid, "end", flush=True)

    def execute(self, requests):
        return []
"""


def started_by_model(server: ServerProcess, times: int = 1) -> list[int]:
    """Return the processes of the last start of the model."""
    wait_for(lambda: server.log.count(' end"') == times)
    words = server.log.rpartition("started ")[2].split()
    return [int(words[0]), int(words[1])]


async def all_ended(pids: list[int]) -> None:
    """Wait for the end of processes that are not our children."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(pidfd, ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


def test_processes_that_a_model_has_started_end_with_the_server(write_model: WriteModel) -> None:
    repository = write_model("starts", CONFIG, STARTS_PROCESSES)
    with ServerProcess(repository) as server:
        processes = started_by_model(server)
        os.kill(server.pid, signal.SIGKILL)
        asyncio.run(all_ended(processes))


def test_processes_that_a_model_has_started_end_with_its_worker(write_model: WriteModel) -> None:
    repository = write_model("starts", CONFIG, STARTS_PROCESSES)
    with ServerProcess(repository) as server:
        first = started_by_model(server)
        [worker] = server.workers("starts")
        os.kill(worker, signal.SIGKILL)
        asyncio.run(all_ended(first))
        second = started_by_model(server, times=2)
    asyncio.run(all_ended(second))


def test_files_of_a_load_request_are_removed_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, repository = tmp_path / "temporary", tmp_path / "repository"
    temporary.mkdir()
    repository.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    flags = ("--model-control-mode=explicit",)
    config = json.dumps({"backend": "identity", "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
                         "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}]})  # fmt: skip
    with ServerProcess(repository, *flags) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        files = {"file:1/model.identity": base64.b64encode(b"x").decode()}
        connection.request(
            "POST", "/v2/repository/models/m/load", json.dumps({"parameters": {"config": config, **files}})
        )
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        connection.close()
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    [folder] = temporary.glob("naiad-model-*")
    with ServerProcess(repository, *flags) as server:
        server.wait_for_log(f"folder '{folder}' was removed: a server that was killed had left it")
        assert not folder.exists()

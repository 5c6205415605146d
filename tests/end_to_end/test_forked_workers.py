"""Workers that are forked: as separate as others, and nothing is left of them, in whatever order all are killed."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel


pytestmark = pytest.mark.slow

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU count: 2 }]
"""

#: Prints what its process is like, and leaves a process with a session of its own behind.
TELLS = """
import gc, json, os, random, signal, sys, threading

class TritonPythonModel:
    def initialize(self, args):
        shared = sys.modules.get("shared_by_instances")
        ignored = [name for name in ("SIGTERM", "SIGHUP") if signal.getsignal(getattr(signal, name)) != signal.SIG_DFL]
        print("tells", json.dumps({
            "random": [random.random(), float(np.random.random())], "hash": hash("x"), "gc": gc.isenabled(),
            "threads": len(os.listdir("/proc/self/task")), "ignored": ignored,
            "telemetry": os.environ["ORT_DISABLE_TELEMETRY"], "openblas": os.environ.get("OPENBLAS_NUM_THREADS"),
            "pid": os.getpid(), "shared": shared and shared.made_in,
        }), flush=True)

    def execute(self, requests):
        return [pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() + 1)]
        ) for request in requests]
"""

DAEMON = """
import os, signal

class TritonPythonModel:
    def initialize(self, args):
        first = os.fork()
        if first == 0:
            os.setsid()
            second = os.fork()
            if second == 0:
                os.closerange(3, 100)
                signal.pause()
            print("daemon", second, "end", flush=True)
            os._exit(0)
        os.waitpid(first, 0)

    def execute(self, requests):
        return []
"""

PRELOAD = """
import os, sys, types
sys.modules["shared_by_instances"] = types.SimpleNamespace(made_in=os.getpid())
"""


def told(server: ServerProcess, count: int) -> list[dict[str, Any]]:
    """Return what the instances of the model have printed."""
    wait_for(lambda: server.log.count("tells {") == count)
    return [json.loads(found) for found in re.findall(r"tells (\{.*?\})", server.log.replace('\\"', '"'))]


def infer(server: ServerProcess, value: int) -> int:
    """Return the value of the output; -1 if there is an error instead."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [value]}]})
    connection.request("POST", "/v2/models/m/infer", body)
    response = json.loads(connection.getresponse().read())
    connection.close()
    return -1 if "error" in response else int(response["outputs"][0]["data"][0])


def zygotes(server: ServerProcess) -> list[int]:
    return [child.pid for child in psutil.Process(server.pid).children() if child.name() == "naiad-zygote"]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def none_lives(pids: list[int]) -> bool:
    """Whether all processes have ended and were waited for."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_forks_are_alike_in_nothing_that_should_differ(write_model: WriteModel) -> None:
    with ServerProcess(write_model("m", CONFIG, TELLS), "--worker-start=fork") as server:
        first, second = told(server, 2)
        workers = server.workers("m")
    assert {first["pid"], second["pid"]} == set(workers)
    assert set(first["random"]).isdisjoint(second["random"])
    assert first["hash"] == second["hash"], "documented"
    for each in (first, second):
        assert each["gc"]
        assert each["threads"] == 1
        assert each["ignored"] == []
        assert each["telemetry"] == "1"
        assert each["openblas"] is None


def test_what_a_model_preloads_is_shared_by_its_instances(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, TELLS)
    (repository / "m" / "preload.py").write_text(PRELOAD)
    with ServerProcess(repository) as server:
        first, second = told(server, 2)
        assert first["shared"] == second["shared"] != first["pid"]
        assert first["shared"] in zygotes(server)
        assert infer(server, 1) == 2


def test_a_wrong_preload_fails_the_load_of_its_model_alone(write_model: WriteModel) -> None:
    write_model("good", CONFIG, TELLS)
    wrong = CONFIG + 'parameters { key: "naiad.preload" value { string_value: "no_such_module_x" } }'
    repository = write_model("bad", wrong, TELLS)
    with ServerProcess(repository, "--exit-on-error=false", "--strict-readiness=false") as server:
        assert server.get("/v2/models/good/ready")[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        connection.request("POST", "/v2/repository/index", "{}")
        index = {item["name"]: item for item in json.loads(connection.getresponse().read())}
        connection.close()
    assert index["bad"]["state"] == "UNAVAILABLE"
    assert "the preload failed: 'no_such_module_x' cannot be imported: ModuleNotFoundError" in index["bad"]["reason"]


def test_a_process_that_has_left_the_session_of_its_worker_ends_with_it(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG.replace("count: 2", "count: 1"), DAEMON)
    with ServerProcess(repository) as server:
        wait_for(lambda: server.log.count(' end"') == 1)
        first = int(server.log.rpartition("daemon ")[2].split()[0])
        assert Path(f"/proc/{first}").exists()
        [worker] = server.workers("m").keys() - {first}  # a fork of the worker looks like it
        kill(worker)
        wait_for(lambda: none_lives([first, worker]))
        wait_for(lambda: server.log.count(' end"') == 2)
        second = int(server.log.rpartition("daemon ")[2].split()[0])
        # The process between the worker and the second one has printed, and ends.
        kernel = psutil.Process(server.pid)
        wait_for(lambda: not any(_is_zombie(child) for child in kernel.children(recursive=True)))
    wait_for(lambda: none_lives([second]))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_process_with_a_session_of_its_own_ends_also_when_the_server_is_killed(
    start: str, write_model: WriteModel
) -> None:
    repository = write_model("m", CONFIG.replace("count: 2", "count: 1"), DAEMON)
    with ServerProcess(repository, f"--worker-start={start}") as server:
        wait_for(lambda: server.log.count(' end"') == 1)
        daemon = int(server.log.rpartition("daemon ")[2].split()[0])
        assert Path(f"/proc/{daemon}").exists()
        kill(server.pid)
        server.wait()
        wait_for(lambda: none_lives([daemon]))


@pytest.mark.parametrize("order", list(itertools.permutations(("zygote", "worker", "kernel"))), ids=" ".join)
def test_nothing_lives_when_all_were_killed_in_any_order(order: tuple[str, ...], write_model: WriteModel) -> None:
    with ServerProcess(write_model("m", CONFIG, TELLS), "--worker-start=fork") as server:
        everything = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
        victims = {"zygote": zygotes(server), "worker": list(server.workers("m")), "kernel": [server.pid]}
        for name in order:
            for pid in victims[name]:
                kill(pid)
        server.wait()
        wait_for(lambda: none_lives(everything))
        # Those that the server has started in between.
        wait_for(lambda: not [each for each in psutil.process_iter() if _is_of(each, server.pid)])


@pytest.mark.parametrize("order", [("zygote", "worker"), ("worker", "zygote")], ids=" ".join)
def test_the_server_goes_on_when_zygote_and_workers_are_killed(order: tuple[str, ...], write_model: WriteModel) -> None:
    with ServerProcess(write_model("m", CONFIG, TELLS), "--worker-start=fork") as server:
        for number in range(3):
            before = zygotes(server)
            victims = {"zygote": before, "worker": list(server.workers("m"))}
            for name in order:
                for pid in victims[name]:
                    kill(pid)
            wait_for(lambda victims=victims: none_lives(victims["zygote"] + victims["worker"]))  # type: ignore[misc]
            wait_for(lambda count=2 * number + 4: server.log.count("is ready again") >= count - 2)  # type: ignore[misc]
            # A start that was under way when the zygote was killed has failed, and there is none for a moment.
            wait_for(lambda number=number: infer(server, number) == number + 1)  # type: ignore[misc]


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False


def _is_of(process: psutil.Process, kernel: int) -> bool:
    """Whether a process is a worker or zygote of this kernel."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return f"--kernel={kernel}" in words or (
            words[1:3] == ["-m", "backends.zygote"] and words[4:5] == [str(kernel)]
        )
    return False

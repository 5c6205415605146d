"""Workers that stand still: a real server notices it, says so, and goes on."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.conftest import WriteModel

#: Faults have the same effects however workers are started.
pytestmark = pytest.mark.usefixtures("worker_start")

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""

# -1: an endless loop in C that ignores SIGTERM; -2: one that SIGTERM ends; other numbers are echoed.
LOOPING = """
import re, signal, time

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0]
            if value < 0:
                print("looping", flush=True)
            if value == -1:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                re.match(r"(a|a?)+$", "a" * 60 + "b")  # one call that takes ages and holds the interpreter lock
            if value == -2:
                time.sleep(1000)
        given = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.as_numpy())]) for each in given]
"""


def timeout(seconds: str) -> str:
    return f'parameters {{ key: "naiad.execution_timeout" value {{ string_value: "{seconds}" }} }}'


def post(server: ServerProcess, path: str, body: object) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if text else None


def infer(server: ServerProcess, value: int, model: str = "m") -> tuple[int, Any]:
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [value]}
    status, body = post(server, f"/v2/models/{model}/infer", {"inputs": [tensor]})
    return status, body["outputs"][0]["data"][0] if status == 200 else body["error"]


@contextmanager
def in_flight(server: ServerProcess, *values: int) -> Iterator[list[tuple[int, Any]]]:
    """Send requests and go on; yields the list that gets their results. Waits for all of them at the end."""
    results: list[tuple[int, Any]] = []
    threads = [threading.Thread(target=lambda value=value: results.append(infer(server, value))) for value in values]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_for(lambda number=number: metric(server, "naiad_inference_in_flight_requests") == number)  # type: ignore[misc]
    yield results
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), "a request hangs"


def metric(server: ServerProcess, name: str) -> float:
    page = server.get("/metrics", server.metrics_port)[1]
    return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + "{")), -1)


def index(server: ServerProcess) -> dict[str, str]:
    [found] = post(server, "/v2/repository/index", {})[1]
    return dict(found)


def ready(server: ServerProcess) -> bool:
    return server.get("/v2/models/m/ready")[0] == 200


@pytest.mark.parametrize(("value", "shared"), [(-1, "true"), (-2, "true"), (-1, "false")])
def test_a_model_in_an_endless_loop_is_replaced_and_its_request_says_why(
    write_model: WriteModel, value: int, shared: str
) -> None:
    repository = write_model("m", CONFIG + timeout("2.0"), LOOPING)
    with ServerProcess(repository, f"--worker-shared-memory={shared}") as server:
        [looping] = server.workers("m")
        with ThreadPoolExecutor(2) as threads:
            ended = threads.submit(infer, server, value)
            server.wait_for_log("m: looping")
            waited = threads.submit(infer, server, 5)
        status, error = ended.result()
        assert (status, waited.result()) == (503, (200, 5)), "what waited is executed by the next worker"
        assert "model 'm' was still executing the request after" in error
        assert "its limit is 2 s (parameter naiad.execution_timeout of the model)" in error
        [worker] = server.workers("m")
        assert worker != looping
        assert not Path(f"/proc/{looping}").exists()
        assert metric(server, "naiad_worker_execution_timeouts_total") == 1
        assert ready(server)


def test_without_a_limit_a_busy_model_is_reported_and_stays_ready(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, LOOPING)
    with ServerProcess(repository, "--execution-report-secs=0.1", "--exit-timeout-secs=0") as server:
        assert "reason" not in index(server)
        with in_flight(server, -1) as results:
            wait_for(lambda: metric(server, "naiad_model_instance_busy_count") == 1)
            found = index(server)
            assert found["state"] == "READY"
            assert found["reason"].startswith("instance 'm_0' busy for ")
            assert ready(server)
            wait_for(lambda: server.log.count("model instance 'm_0' busy for") >= 2)
            wait_for(lambda: re.search(r"m: +File .*m/1/model.py.*, line \d+ in execute", server.log) is not None)
            server.terminate()
        assert "took longer than the exit timeout" in results[0][1]


def test_a_stopped_worker_makes_its_model_not_ready_until_it_goes_on(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, LOOPING)
    with ServerProcess(repository) as server:
        [worker] = server.workers("m")
        os.kill(worker, signal.SIGSTOP)
        wait_for(lambda: not ready(server))
        assert index(server)["reason"] == "instance 'm_0' stopped by a signal (SIGSTOP)"
        assert server.get("/v2/health/ready")[0] != 200
        assert metric(server, "naiad_model_instance_stopped_count") == 1
        with in_flight(server, 5) as results:
            os.kill(worker, signal.SIGCONT)
        assert results == [(200, 5)]
        assert ready(server)
        assert "reason" not in index(server)
        assert list(server.workers("m")) == [worker]


def test_a_request_that_a_killed_worker_was_sent_and_had_not_begun_goes_to_the_next(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, LOOPING)
    with ServerProcess(repository) as server:
        [worker] = server.workers("m")
        os.kill(worker, signal.SIGSTOP)
        with in_flight(server, 5) as results:
            os.kill(worker, signal.SIGKILL)
        assert results == [(200, 5)]
        assert worker not in server.workers("m")


def test_an_unloaded_model_in_an_endless_loop_ends_after_its_grace(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, LOOPING)
    flags = ("--model-control-mode=explicit", "--load-model=m", "--model-unload-timeout-secs=1")
    with ServerProcess(repository, *flags) as server:
        [looping] = server.workers("m")
        with in_flight(server, -1) as results:
            assert post(server, "/v2/repository/models/m/unload", {})[0] == 200
            wait_for(lambda: not Path(f"/proc/{looping}").exists())
        assert results == [
            (
                503,
                "model 'm' was unloaded or replaced, and the request was not finished within 1 s "
                "(--model-unload-timeout-secs)",
            )
        ]
        wait_for(lambda: index(server).get("reason") == "unloaded")
        assert not server.workers("m")


def test_a_reloaded_model_keeps_serving_while_its_old_version_loops_and_is_killed(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, LOOPING)
    flags = ("--model-control-mode=explicit", "--load-model=m", "--model-unload-timeout-secs=1")
    with ServerProcess(repository, *flags) as server:
        [looping] = server.workers("m")
        with in_flight(server, -1) as results:
            (repository / "m/1/model.py").write_text((repository / "m/1/model.py").read_text() + "\n")
            assert post(server, "/v2/repository/models/m/load", {})[0] == 200
            assert infer(server, 5) == (200, 5)
            wait_for(lambda: not Path(f"/proc/{looping}").exists())
        assert results[0][0] == 503
        assert infer(server, 6) == (200, 6)


def test_a_server_that_stops_waits_for_versions_that_are_being_unloaded(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, LOOPING)
    flags = ("--model-control-mode=explicit", "--load-model=m", "--exit-timeout-secs=20")
    with ServerProcess(repository, *flags) as server:
        [worker] = server.workers("m")
        with in_flight(server, -2, 5) as results:
            assert post(server, "/v2/repository/models/m/unload", {})[0] == 200
            server.terminate()
            wait_for(lambda: "Stopping: 2 requests in flight" in server.log)
            os.kill(worker, signal.SIGTERM)
        code = server.wait()
        assert code == 0, server.log
        assert sorted(status for status, _ in results) == [200, 503]


def test_a_server_that_stops_kills_a_model_that_loops(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, LOOPING)
    with ServerProcess(repository, "--exit-timeout-secs=1") as server:
        [looping] = server.workers("m")
        with in_flight(server, -1):
            server.terminate()
        assert server.wait() == 1
        assert not Path(f"/proc/{looping}").exists()


# Shortens each memory file that it shares with the kernel, or sends it garbage, and goes on.
HOSTILE = """
import os, socket, stat

def files():
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            status = os.stat(int(name))
        except OSError:
            continue
        yield int(name), target, status

class TritonPythonModel:
    def execute(self, requests):
        value = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()[0]
        if value == 1:
            for fd, target, status in files():
                if "memfd:naiad" in target:
                    for _ in (0, 1):
                        try:
                            os.ftruncate(fd, 0)
                        except OSError as error:
                            print("refused:", target, error, flush=True)
        if value == 2:
            for fd, target, status in files():
                if stat.S_ISSOCK(status.st_mode):
                    os.write(fd, b"GET / HTTP/1.1")
        if value == 3:
            raise pb_utils.TritonModelException("no file " + os.fsdecode(b"caf\\xe9"))
        if value == 4:
            raise pb_utils.TritonModelException("x" * 50_000_000)
        if value == 6:
            import threading
            import backends.worker.loop
            threading.Thread(target=threading.Event().wait).start()
            backends.worker.loop.time = None
        output = pb_utils.Tensor("OUT", np.full([1], value, np.int32))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
"""


def test_a_model_that_shortens_the_memory_that_it_shares_hurts_nobody(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, HOSTILE)
    with ServerProcess(repository) as server:
        assert infer(server, 1) == (200, 1)
        assert infer(server, 5) == (200, 5)
        server.wait_for_log("refused: /memfd:naiad outbox")


def test_a_model_that_writes_into_the_connection_of_its_worker_is_replaced(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, HOSTILE)
    with ServerProcess(repository) as server:
        [worker] = server.workers("m")
        status, text = infer(server, 2)
        assert status == 503
        assert "it sent an invalid message: a message of 542393671 bytes, the largest has 16777216" in text
        assert infer(server, 5) == (200, 5)
        assert worker not in server.workers("m")


def test_a_worker_that_fails_is_replaced_although_threads_of_its_model_go_on(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, HOSTILE)
    with ServerProcess(repository) as server:
        [worker] = server.workers("m")
        status, text = infer(server, 6)
        assert (status, "was lost while it executed the request" in text) == (503, True)
        assert infer(server, 5) == (200, 5)
        assert worker not in server.workers("m")
        server.wait_for_log("the worker failed")
        server.wait_for_log("AttributeError")


def test_an_error_with_any_text_leaves_the_worker_alive(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, HOSTILE)
    with ServerProcess(repository) as server:
        [worker] = server.workers("m")
        status, text = infer(server, 3)
        assert (status, "caf\\udce9" in text) == (500, True)
        status, text = infer(server, 4)
        assert status == 500
        assert len(text) < 1 << 17
        assert "the whole text has 500" in text
        assert infer(server, 5) == (200, 5)
        assert list(server.workers("m")) == [worker]


# Notes each request that reaches it.
LEDGER = """
import os
PATH = os.path.join(pb_utils.get_model_dir(), "ledger")

class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        with open(PATH, "a") as ledger:
            ledger.write("".join(f"{value[0]}\\n" for value in given))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in given]
"""


def test_of_killed_workers_only_what_had_reached_the_model_is_lost(write_model: WriteModel) -> None:
    repository = write_model("m", CONFIG, LEDGER)
    outcomes: dict[int, tuple[int, Any]] = {}
    with ServerProcess(repository) as server:
        stop = threading.Event()

        def call(number: int) -> None:
            while not stop.is_set():
                outcomes[number] = infer(server, number)
                number += 8

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(6):
            seen = len(outcomes)
            wait_for(lambda seen=seen: len(outcomes) > seen + 20 and len(server.workers("m")) == 1)  # type: ignore[misc]
            [worker] = server.workers("m")
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda worker=worker: worker not in server.workers("m"))  # type: ignore[misc]
        stop.set()
        for thread in threads:
            thread.join(50)
            assert not thread.is_alive(), "a request hangs"
    reached = Counter(map(int, (repository / "m/1/ledger").read_text().split()))
    assert max(reached.values()) == 1, "a request was executed twice"
    lost = {number: text for number, (status, text) in outcomes.items() if status != 200}
    for number, text in lost.items():
        assert "was lost while it executed the request" in text or "had not reached the model" in text
        assert ("executed" in text) or number not in reached

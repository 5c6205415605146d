"""SIGTERM and a closed terminal drain: what was accepted is answered, then the server ends with 0."""

from __future__ import annotations

import fcntl
import http.client
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""

# Executes until there is a file "go" beside it.
SLOW = """
import os, time
GO = os.path.join(pb_utils.get_model_dir(), "go")

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            print("executing", flush=True)
        while not os.path.exists(GO):
            time.sleep(0.01)
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in given]

    def finalize(self):
        print("finalized", flush=True)
"""

BODY = json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]})


@pytest.fixture(autouse=True)
def _servers_are_told_of_a_closed_terminal() -> Iterator[None]:
    """A server inherits an ignored SIGHUP, which is what nohup gives the tests; what has a handler it does not."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_requests_in_flight_are_answered_and_the_server_exits_with_zero(
    write_model: WriteModel, number: signal.Signals
) -> None:
    repository = write_model("slow", CONFIG, SLOW)
    with ServerProcess(repository) as server:
        statuses: list[int] = []

        def call() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
            connection.request("POST", "/v2/models/slow/infer", BODY)
            statuses.append(connection.getresponse().status)
            connection.close()

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        metrics = 'nv_inference_pending_request_count{model="slow",version="1"} 3'
        wait_for(lambda: metrics in server.get("/metrics", server.metrics_port)[1])
        os.kill(server.pid, number)
        wait_for(lambda: "Stopping: 4 requests in flight" in server.log)
        (repository / "slow/1/go").touch()
        code = server.wait()
        for thread in threads:
            thread.join(60)
        log = server.log
    assert code == 0, log
    assert statuses == [200] * 4
    assert f"Signal ({int(number)}) received." in log
    assert "slow: finalized" in log


def test_a_closed_terminal_loses_no_request(write_model: WriteModel) -> None:
    repository = write_model("slow", CONFIG, SLOW)
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "kernel", "run", str(repository), "--http-port=0", "--http-address=127.0.0.1",
               "--allow-grpc=false", "--allow-metrics=false"]  # fmt: skip
    server = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    try:
        shown = _read_until(master, b"Started HTTPService at ", b"\n")
        port = int(re.findall(rb"Started HTTPService at [\d.]+:(\d+)", shown)[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v2/models/slow/infer", BODY)
        _read_until(master, b"executing")
        os.close(master)  # the system sends SIGHUP
        (repository / "slow/1/go").touch()
        assert connection.getresponse().status == 200
        connection.close()
        assert server.wait(40) == 0
    finally:
        server.kill()
        server.wait()


def _read_until(terminal: int, *texts: bytes) -> bytes:
    """Return what the terminal shows to the end of the last of `texts`, which come one after the other."""
    shown, position = b"", 0
    for text in texts:
        while (found := shown.find(text, position)) < 0:
            shown += os.read(terminal, 65536)
        position = found + len(text)
    return shown[:position]


def test_a_server_under_nohup_ignores_a_closed_terminal(write_model: WriteModel) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = ServerProcess(write_model("slow", CONFIG, SLOW))
        server.start()
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        os.kill(server.pid, signal.SIGHUP)
        server.terminate()
        code = server.wait()
        log = server.log
    finally:
        server.stop()
    assert code == 0, log
    assert "Signal (15) received." in log
    assert "Signal (1)" not in log


def test_a_request_that_takes_longer_than_the_exit_timeout_is_answered_with_an_error(
    write_model: WriteModel,
) -> None:
    repository = write_model("slow", CONFIG, SLOW)
    with ServerProcess(repository, "--exit-timeout-secs=1") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        connection.request("POST", "/v2/models/slow/infer", BODY)
        wait_for(lambda: "executing" in server.log)
        server.terminate()
        reply = connection.getresponse()
        assert reply.status == 503
        assert "took longer than the exit timeout" in reply.read().decode()
        code = server.wait()
        log = server.log
        connection.close()
    assert code == 1
    assert "Exit timeout expired" in log


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_load_request_that_hangs_is_answered_with_an_error_and_the_server_exits_with_zero(
    write_model: WriteModel, protocol: str
) -> None:
    source = "import time\nprint('loading', flush=True)\ntime.sleep(600)\n"
    repository = write_model("hangs", CONFIG, source)
    with ServerProcess(repository, "--model-control-mode=explicit", "--exit-timeout-secs=600") as server:
        module = tritonclient.http if protocol == "http" else tritonclient.grpc
        errors: list[str] = []

        def load() -> None:
            with module.InferenceServerClient(f"127.0.0.1:{getattr(server, f'{protocol}_port')}") as client:
                try:
                    client.load_model("hangs")
                except InferenceServerException as error:
                    errors.append(str(error))

        client = threading.Thread(target=load)
        client.start()
        wait_for(lambda: "hangs: loading" in server.log)
        server.terminate()
        code = server.wait()
        client.join()
        log = server.log
    assert code == 0, log
    assert len(errors) == 1
    assert "the load was ended, because the server stops" in errors[0]


def test_a_signal_while_models_load_ends_the_server(write_model: WriteModel) -> None:
    source = "import time\nprint('loading', flush=True)\ntime.sleep(60)\n"
    repository = write_model("late", CONFIG, source)
    server = ServerProcess(repository)
    starter = threading.Thread(target=lambda: _start(server))
    starter.start()
    wait_for(lambda: "late: loading" in server.log)
    server.terminate()
    starter.join(60)
    assert not starter.is_alive()


def _start(server: ServerProcess) -> None:
    import contextlib

    from bench.server import ServerFailed

    with contextlib.suppress(ServerFailed):
        server.start()


LEDGER = """
import os
PATH = os.path.join(pb_utils.get_model_dir(), "ledger")

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            with open(PATH, "a") as ledger:
                ledger.write(f"{value[0]}\\n")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""


def test_under_load_every_request_that_was_executed_is_answered(write_model: WriteModel) -> None:
    repository = write_model("ledger", CONFIG, LEDGER)
    with ServerProcess(repository) as server:
        outcomes: dict[int, str] = {}

        def call(first: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
            for number in itertools.count(first, 8):
                tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [number]}
                try:
                    connection.request("POST", "/v2/models/ledger/infer", json.dumps({"inputs": [tensor]}))
                    reply = connection.getresponse()
                    outcomes[number] = f"{reply.status} {reply.read().decode()}"
                except (OSError, http.client.HTTPException) as error:
                    outcomes[number] = type(error).__name__
                    break  # the server is gone
            connection.close()

        threads = [threading.Thread(target=call, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(outcomes) > 500)
        server.terminate()
        code = server.wait()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert code == 0
    executed = set(map(int, (repository / "ledger/1/ledger").read_text().split()))
    answered = {number for number, outcome in outcomes.items() if outcome.startswith("200 ")}
    assert executed == answered
    refused = {outcome for outcome in outcomes.values() if outcome[:3].isdigit() and not outcome.startswith("200 ")}
    assert all(outcome.startswith("503 ") for outcome in refused), refused

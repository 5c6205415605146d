"""A server whose models load: it is live and not ready, and says what it waits for."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from bench.server import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1")

TENSORS = """
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
"""

#: Loads as long as there is no file `gate` in the repository; fails if that is not empty.
GATED = """
import pathlib
import time

class TritonPythonModel:
    def initialize(self, args):
        gate = pathlib.Path(args["model_repository"]).parent / "gate"
        while not gate.exists():
            time.sleep(0.01)
        if gate.read_text():
            raise ValueError(gate.read_text())

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))]) for _ in requests]
"""


class Loading:
    """A server that loads the model `slow`, and has loaded `quick`."""

    def __init__(self, process: subprocess.Popen[bytes], repository: Path) -> None:
        self.process = process
        self._repository = repository
        self.ports: dict[str, int] = {}

    @property
    def log(self) -> str:
        return (self._repository / "log").read_text()

    def open_gate(self, failure: str = "") -> None:
        (self._repository / "new gate").write_text(failure)
        (self._repository / "new gate").rename(self._repository / "gate")

    def get(self, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["HTTPService"], timeout=60)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()

    def wait_until_logged(self, text: str) -> None:
        wait_for(lambda: text in self.log)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, write_model: WriteModel) -> Iterator[Callable[..., Loading]]:
    write_model("quick", TENSORS, GATED.replace("def initialize", "def not_called"))
    repository = write_model("slow", TENSORS, GATED)
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> Loading:
            log = stack.enter_context((repository / "log").open("wb"))
            command = [sys.executable, "-m", "kernel", "run", str(repository), *PORTS, *flags]
            process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
            stack.callback(process.kill)
            return Loading(process, repository)

        yield start


def listening(loading: Loading) -> Loading:
    loading.wait_until_logged("not ready until the models are loaded")
    loading.wait_until_logged("successfully loaded 'quick'")
    line = next(line for line in loading.log.splitlines() if "not ready until" in line)
    loading.ports = {name: int(port) for name, port in re.findall(r"(\w+) at 127\.0\.0\.1:(\d+)", line)}
    return loading


REQUEST = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}


def test_a_server_whose_models_load_is_live_and_not_ready(start: Callable[..., Loading]) -> None:
    loading = listening(start())
    assert loading.get("/v2/health/live")[0] == 200
    assert loading.get("/v2/health/ready")[0] == 400
    assert loading.get("/v2/models/slow/ready")[0] == 400
    assert loading.get("/v2/models/quick/infer", REQUEST)[0] == 200
    assert loading.get("/v2/models/slow/infer", REQUEST)[0] == 404
    with triton.InferenceServerClient(f"127.0.0.1:{loading.ports['GRPCInferenceService']}") as client:
        assert client.is_server_live()
        assert not client.is_server_ready()
        with pytest.raises(InferenceServerException):
            client.get_model_metadata("slow")
        assert "Started HTTPService" not in loading.log
        loading.open_gate()
        loading.wait_until_logged("Started HTTPService")
        assert client.is_server_ready()
    assert loading.get("/v2/health/ready")[0] == 200
    assert loading.get("/v2/models/slow/infer", REQUEST)[0] == 200


def test_the_log_says_when_each_model_begins_to_load_and_when_it_is_loaded(start: Callable[..., Loading]) -> None:
    loading = listening(start())
    loading.open_gate()
    loading.wait_until_logged("Started HTTPService")
    for name in ("quick", "slow"):
        assert loading.log.index(f'"loading: {name}:1"') < loading.log.index(f"successfully loaded '{name}' version 1")


def test_a_server_that_is_told_to_stop_while_its_models_load_stops(start: Callable[..., Loading]) -> None:
    loading = listening(start())
    loading.process.send_signal(signal.SIGTERM)
    assert loading.process.wait(60) == 0
    with pytest.raises(ConnectionRefusedError):
        loading.get("/v2/health/live")


def test_a_server_that_listens_ends_all_the_same_if_a_model_cannot_be_loaded(start: Callable[..., Loading]) -> None:
    loading = listening(start())
    loading.open_gate("no luck")
    assert loading.process.wait(60) == 1
    assert "no luck" in loading.log
    assert "failed to load all models: slow" in loading.log
    with pytest.raises(ConnectionRefusedError):
        loading.get("/v2/health/live")


def test_in_triton_s_order_the_ports_refuse_connections_until_all_models_are_loaded(
    start: Callable[..., Loading],
) -> None:
    loading = start("--listen-while-loading=false")
    loading.wait_until_logged("successfully loaded 'quick'")
    assert "listening" not in loading.log
    loading.open_gate()
    loading.wait_until_logged("Started HTTPService")
    found = re.search(r"Started HTTPService at 127\.0\.0\.1:(\d+)", loading.log)
    assert found is not None
    loading.ports = {"HTTPService": int(found[1])}
    assert loading.get("/v2/health/ready")[0] == 200

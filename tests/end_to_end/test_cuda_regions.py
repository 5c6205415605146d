"""CUDA shared memory with tritonclient, over a CUDA of POSIX shared memory (`tests/fake_cuda`): no GPU is needed."""

from __future__ import annotations

import base64
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from bench.server import ServerProcess, wait_for
from shm.cuda import BINDINGS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""

# Doubles. If the first element is negative, it waits until a file is there.
DOUBLES = """
import os, time

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if given[0] < 0:
                open(os.path.join(os.environ["GATE"], "executes"), "w").close()
            while given[0] < 0 and not os.path.exists(os.path.join(os.environ["GATE"], "open")):
                time.sleep(0.001)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given * 2)]))
        return responses
"""

COUNT = 1000
BYTE_SIZE = 4 * COUNT

#: In the command line of the model's worker.
TITLE = re.compile(r"--model=doubles\S*")
VALUES = np.arange(COUNT, dtype=np.float32)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, write_model: WriteModel, tmp_path: Path) -> Iterator[ServerProcess]:
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    monkeypatch.setenv("GATE", str(tmp_path))
    with ServerProcess(write_model("doubles", CONFIG, DOUBLES)) as process:
        yield process


class Case:
    """A client of one protocol with an input region `in` and an output region `out`."""

    def __init__(self, protocol: str, server: ServerProcess, regions: Any) -> None:
        self.module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
        self.client = self.another_client(server)
        self.regions = regions
        self.memory = {name: regions.create_shared_memory_region(name, BYTE_SIZE, 0) for name in ("in", "out")}
        for name in self.memory:
            self.register(name)

    def another_client(self, server: ServerProcess) -> Any:
        url = server.url if self.module is tritonclient.http else server.grpc_url
        return self.module.InferenceServerClient(url)

    def register(self, name: str, byte_size: int = BYTE_SIZE, device: int = 0) -> None:
        handle = self.regions.get_raw_handle(self.memory[name])
        self.client.register_cuda_shared_memory(name, handle, device, byte_size)

    def names(self) -> list[str]:
        found = self.client.get_cuda_shared_memory_status()
        entries = found if isinstance(found, list) else found.regions.values()
        return sorted(each["name"] if isinstance(each, dict) else each.name for each in entries)

    def arguments(self) -> dict[str, Any]:
        given = self.module.InferInput("IN", [COUNT], "FP32")
        given.set_shared_memory("in", BYTE_SIZE)
        wanted = self.module.InferRequestedOutput("OUT")
        wanted.set_shared_memory("out", BYTE_SIZE)
        return {"model_name": "doubles", "inputs": [given], "outputs": [wanted]}

    def infer(self, values: Any = VALUES) -> Any:
        """Return the output region after a request with `values`."""
        self.regions.set_shared_memory_region(self.memory["in"], [values])
        self.client.infer(**self.arguments())
        return self.regions.get_contents_as_numpy(self.memory["out"], np.float32, [COUNT])

    def close(self) -> None:
        self.client.unregister_cuda_shared_memory()
        self.client.close()
        for region in self.memory.values():
            self.regions.destroy_shared_memory_region(region)


@pytest.fixture(params=["http", "grpc"])
def case(request: pytest.FixtureRequest, server: ServerProcess, regions: Any) -> Iterator[Case]:
    found = Case(request.param, server, regions)
    yield found
    found.close()


def worker_of(server: ServerProcess) -> psutil.Process:
    [worker] = [each for each in psutil.Process(server.pid).children() if TITLE.search(" ".join(each.cmdline()))]
    return worker


def test_a_request_has_its_input_and_its_output_in_device_memory(case: Case) -> None:
    assert case.names() == ["in", "out"]
    for factor in (1, 3):
        assert np.array_equal(case.infer(VALUES * factor), VALUES * 2 * factor)
    case.client.unregister_cuda_shared_memory("in")
    assert case.names() == ["out"]
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'in'"):
        case.client.infer(**case.arguments())


def test_what_cannot_be_registered_has_tritons_texts(case: Case) -> None:
    with pytest.raises(InferenceServerException, match="shared memory region 'in' already in manager"):
        case.register("in")
    case.client.unregister_cuda_shared_memory("in")
    with pytest.raises(InferenceServerException, match="failed to register shared memory region 'in': invalid args"):
        case.register("in", BYTE_SIZE + 1)
    for device in (1, 2**31 - 1):
        with pytest.raises(InferenceServerException, match="failed to register shared memory region: invalid args"):
            case.register("in", device=device)
    with pytest.raises(InferenceServerException, match="failed to register shared memory region: invalid args"):
        case.client.register_cuda_shared_memory("garbage", base64.b64encode(bytes(64)), 0, 64)
    with pytest.raises(InferenceServerException, match="'raw_handle' must be a valid base64 encoded"):
        case.client.register_cuda_shared_memory("short", base64.b64encode(bytes(63)), 0, 64)
    assert case.names() == ["out"]


def test_a_region_that_a_request_uses_stays_until_its_response(
    case: Case, server: ServerProcess, tmp_path: Path
) -> None:
    case.regions.set_shared_memory_region(case.memory["in"], [VALUES - 1])
    with ThreadPoolExecutor(1) as pool:
        other = case.another_client(server)  # that of HTTP may be used in one thread only
        answer = pool.submit(other.infer, **case.arguments())
        while not (tmp_path / "executes").exists():
            assert not answer.done()
        case.client.unregister_cuda_shared_memory()
        assert case.names() == ["in", "out"]
        (tmp_path / "open").touch()
        answer.result()
        other.close()
    found = case.regions.get_contents_as_numpy(case.memory["out"], np.float32, [COUNT])
    assert np.array_equal(found, (VALUES - 1) * 2)
    assert case.names() == []


def test_a_worker_that_was_killed_opens_the_memory_again(case: Case, server: ServerProcess) -> None:
    case.infer()
    worker_of(server).send_signal(signal.SIGKILL)
    assert np.array_equal(case.infer(VALUES + 1), (VALUES + 1) * 2)


def test_memory_that_its_owner_has_freed_is_an_error_of_the_request(case: Case, server: ServerProcess) -> None:
    pid = worker_of(server).pid
    case.regions.destroy_shared_memory_region(case.memory.pop("in"))
    with pytest.raises(InferenceServerException, match="the exporting process has freed the memory, or has ended"):
        case.client.infer(**case.arguments())
    assert worker_of(server).pid == pid


def test_a_server_without_a_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, write_model: WriteModel, regions: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    with monkeypatch.context() as without:
        without.setenv("FAKE_CUDA_DEVICES", "0")
        server = ServerProcess(write_model("doubles", CONFIG, DOUBLES))
        server.start()
    try:
        client: Any = tritonclient.http.InferenceServerClient(server.url)
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="region: 'in', GPUs not supported"):
                client.register_cuda_shared_memory("in", base64.b64encode(bytes(64)), 0, 64)
        client.close()
        wait_for(lambda: "no GPU is visible" in server.log)
        assert server.log.count("no GPU is visible") == 1
    finally:
        server.stop()

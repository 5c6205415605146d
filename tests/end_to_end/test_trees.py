"""Models of trees in a whole server: protocols, shared memory, batches, kills, many loads."""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import shared_memory

from bench.server import ServerProcess
from tests.backends.fil.conftest import FEATURES, fitted, rows
from tests.end_to_end.repeated_loads import load_two_hundred_times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shm.arrays import Array

pytest.importorskip("treelite", reason="needs the extra fil")
xgboost: Any = pytest.importorskip("xgboost", reason="needs xgboost-cpu")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model() -> Any:
    return fitted(xgboost.XGBRegressor, 0, max_depth=3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Iterator[ServerProcess]:
    models = tmp_path_factory.mktemp("models")
    for name in ("alone", "forked"):
        (models / name / "1").mkdir(parents=True)
        model.save_model(models / name / "1" / "xgboost.ubj")
    with ServerProcess(models, "--model-control-mode=explicit", "--load-model=alone") as running:
        yield running


def over_http(server: ServerProcess, name: str, given: Array) -> Array:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        tensor = tritonclient.http.InferInput("input__0", list(given.shape), "FP32")
        tensor.set_data_from_numpy(given)
        found: Array = client.infer(name, [tensor]).as_numpy("output__0")
        return found


def test_http_grpc_json_and_shared_memory_give_what_the_library_gives(server: ServerProcess, model: Any) -> None:
    given = rows(7)
    expected = model.predict(given)
    assert np.allclose(over_http(server, "alone", given), expected, atol=1e-5)
    body = {"inputs": [{"name": "input__0", "datatype": "FP32", "shape": [7, FEATURES], "data": given.tolist()}]}
    url = f"http://127.0.0.1:{server.http_port}/v2/models/alone/infer"
    with urllib.request.urlopen(url, json.dumps(body).encode()) as response:
        output = json.load(response)["outputs"][0]
    assert output["shape"] == [7]
    assert np.allclose(output["data"], expected, atol=1e-5)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        tensor = tritonclient.grpc.InferInput("input__0", list(given.shape), "FP32")
        tensor.set_data_from_numpy(given)
        assert np.allclose(client.infer("alone", [tensor]).as_numpy("output__0"), expected, atol=1e-5)
        key = f"/trees_{os.getpid()}"
        region = shared_memory.create_shared_memory_region("trees", key, given.nbytes)
        try:
            shared_memory.set_shared_memory_region(region, [given])
            client.register_system_shared_memory("trees", key, given.nbytes)
            tensor.set_shared_memory("trees", given.nbytes)
            assert np.allclose(client.infer("alone", [tensor]).as_numpy("output__0"), expected, atol=1e-5)
            client.unregister_system_shared_memory("trees")
        finally:
            shared_memory.destroy_shared_memory_region(region)


def test_requests_at_the_same_time_get_what_each_gets_alone(server: ServerProcess) -> None:
    parts = [rows(1 + number % 5, seed=number) for number in range(24)]
    alone = [over_http(server, "alone", part) for part in parts]
    found: dict[int, Array] = {}

    def ask(number: int) -> None:
        found[number] = over_http(server, "alone", parts[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[number], alone[number]) for number in range(len(parts)))


def test_a_worker_that_is_killed_is_forked_again_from_a_zygote_with_the_library(
    server: ServerProcess, model: Any
) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        expected = over_http(server, "alone", rows(3))
        for _ in range(2):
            [worker] = [psutil.Process(pid) for pid in server.workers("alone")]
            assert any(word.startswith("--mark=") for word in worker.cmdline()), "it is a fork"
            worker.kill()
            worker.wait(60)
            assert np.array_equal(over_http(server, "alone", rows(3)), expected)
        client.load_model("forked")
        large = rows(3000)  # computed by more than one thread
        assert np.allclose(over_http(server, "forked", large), model.predict(large), atol=1e-5)
        client.unload_model("forked")
    assert "leaves" not in server.log, "the import of the libraries leaves no thread"


def test_two_hundred_loads_leave_nothing(server: ServerProcess) -> None:
    load_two_hundred_times(server, "forked")

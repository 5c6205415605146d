"""Models of scikit-learn in a whole server; pickles in a repository and in load requests."""

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
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tritonclient.utils import InferenceServerException, shared_memory

from bench.server import ServerProcess
from tests.backends.sklearn.conftest import rows, words
from tests.backends.sklearn.makes_a_folder import MakesAFolder
from tests.end_to_end.repeated_loads import load_two_hundred_times

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shm.arrays import Array

joblib: Any = pytest.importorskip("joblib")
skops: Any = pytest.importorskip("skops.io", reason="needs the extra sklearn")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAINED = rows(200, seed=0)
MODELS = {
    "pipeline": make_pipeline(StandardScaler(), LogisticRegression()),
    "forest": RandomForestClassifier(5, n_jobs=-1, random_state=0),
    "boosted": HistGradientBoostingClassifier(max_iter=5),  # computes with a team of OpenMP threads
}


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the pickle of the server makes if it is executed."""
    return tmp_path_factory.mktemp("mark") / "executed"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mark: Path) -> Iterator[ServerProcess]:
    models = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        (models / name / "1").mkdir(parents=True)
        skops.dump(model.fit(TRAINED, words(TRAINED)), models / name / "1" / "model.skops")
    for name in ("allowed", "refused"):
        (models / name / "1").mkdir(parents=True)
        joblib.dump(MODELS["pipeline"] if name == "allowed" else MakesAFolder(mark), models / name / "1/model.joblib")
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false", "--allow-pickle=allowed")
    with ServerProcess(models, *flags, "--strict-readiness=false") as running:
        yield running


def over_http(server: ServerProcess, name: str, given: Array, output: str = "predict_proba") -> Array:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        tensor = tritonclient.http.InferInput("input", list(given.shape), "FP64")
        tensor.set_data_from_numpy(given)
        wanted = [tritonclient.http.InferRequestedOutput(output)]
        found: Array = client.infer(name, [tensor], outputs=wanted).as_numpy(output)
        return found


@pytest.mark.parametrize("name", [*MODELS, "allowed"])
def test_http_grpc_json_and_shared_memory_give_what_the_estimator_gives(server: ServerProcess, name: str) -> None:
    model, given = MODELS.get(name, MODELS["pipeline"]), rows(5)
    expected = model.predict_proba(given)
    assert np.array_equal(over_http(server, name, given), expected)
    body = {"inputs": [{"name": "input", "datatype": "FP64", "shape": [5, 4], "data": given.tolist()}]}
    url = f"http://127.0.0.1:{server.http_port}/v2/models/{name}/infer"
    with urllib.request.urlopen(url, json.dumps(body).encode()) as response:
        found = {each["name"]: each["data"] for each in json.load(response)["outputs"]}
    assert found["predict"] == model.predict(given).tolist()
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        tensor = tritonclient.grpc.InferInput("input", list(given.shape), "FP64")
        key = f"/sklearn_{os.getpid()}_{name}"
        region = shared_memory.create_shared_memory_region(name, key, given.nbytes)
        try:
            shared_memory.set_shared_memory_region(region, [given])
            client.register_system_shared_memory(name, key, given.nbytes)
            tensor.set_shared_memory(name, given.nbytes)
            assert np.array_equal(client.infer(name, [tensor]).as_numpy("predict_proba"), expected)
            client.unregister_system_shared_memory(name)
        finally:
            shared_memory.destroy_shared_memory_region(region)


def test_requests_at_the_same_time_get_what_each_gets_alone(server: ServerProcess) -> None:
    parts = [rows(1 + number % 5, seed=number) for number in range(24)]
    alone = [over_http(server, "forest", part) for part in parts]
    found: dict[int, Array] = {}

    def ask(number: int) -> None:
        found[number] = over_http(server, "forest", parts[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[number], alone[number]) for number in range(len(parts)))


def test_a_worker_that_is_killed_is_forked_again_and_computes(server: ServerProcess) -> None:
    expected = over_http(server, "boosted", rows(3))
    for _ in range(2):
        [worker] = [psutil.Process(pid) for pid in server.workers("boosted")]
        assert any(word.startswith("--mark=") for word in worker.cmdline()), "it is a fork"
        worker.kill()
        worker.wait(60)
        assert np.array_equal(over_http(server, "boosted", rows(3)), expected)


def test_a_pickle_without_permission_is_refused_and_not_executed(server: ServerProcess, mark: Path) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        [entry] = [each for each in client.get_model_repository_index() if each["name"] == "refused"]
        assert entry["state"] == "UNAVAILABLE"
        assert "start the server with --allow-pickle=refused" in entry["reason"]
        # A load request cannot allow it either: with its configuration, or with another file of the same kind.
        config = json.dumps({"backend": "sklearn", "parameters": {"allow-pickle": {"string_value": "true"}}})
        data = pickled_for(mark)
        with pytest.raises(InferenceServerException, match="--allow-pickle=refused"):
            client.load_model("refused", config=config, files={"file:1/model.pkl": data})
    assert not mark.exists()


def pickled_for(mark: Path) -> bytes:
    """Return a pickle that makes the folder `mark`."""
    joblib.dump(MakesAFolder(mark), mark.with_name("file.pkl"))
    return mark.with_name("file.pkl").read_bytes()


def test_two_hundred_loads_leave_nothing(server: ServerProcess) -> None:
    load_two_hundred_times(server, "pipeline")
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        client.load_model("pipeline")

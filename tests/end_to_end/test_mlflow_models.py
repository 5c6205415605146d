"""Folders of MLflow in a whole server and by `naiad run FOLDER`; a pickle inside one is not executed."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from sklearn.linear_model import LogisticRegression
from tritonclient.utils import shared_memory

from bench.server import ServerProcess
from tests.backends.mlflow.conftest import COLUMNS, LABEL, TENSOR, mlmodel, rows
from tests.backends.sklearn.makes_a_folder import MakesAFolder
from tests.end_to_end.repeated_loads import load_two_hundred_times

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

joblib: Any = pytest.importorskip("joblib")
lightgbm: Any = pytest.importorskip("lightgbm")
onnx: Any = pytest.importorskip("onnx")
pandas: Any = pytest.importorskip("pandas")
skops: Any = pytest.importorskip("skops.io", reason="needs the extra mlflow")
xgboost: Any = pytest.importorskip("xgboost")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAINED = rows(200, seed=0)
TABLE = pandas.DataFrame(TRAINED, columns=list("abcd"))
CLASSES = (TRAINED[:, 0] > 0.5).astype(int)
LINEAR = LogisticRegression().fit(TABLE, CLASSES)


def write_table(folder: Path) -> None:
    """Write a folder of MLflow with a model of four columns."""
    folder.mkdir(parents=True)
    skops.dump(LINEAR, folder / "model.skops")
    (folder / "MLmodel").write_text(mlmodel("sklearn", {"pickled_model": "model.skops"}, COLUMNS, LABEL))


def write_trees(folder: Path) -> None:
    """Write a folder of MLflow with a model of one tensor."""
    folder.mkdir(parents=True)
    trained_trees().save_model(folder / "model.ubj")
    fields = {"data": "model.ubj", "model_class": "xgboost.core.Booster"}
    (folder / "MLmodel").write_text(mlmodel("xgboost", fields, TENSOR))


def trained_trees() -> Any:
    return xgboost.train({"nthread": 1}, xgboost.DMatrix(TRAINED, CLASSES), 5)


def write_leaves(folder: Path) -> None:
    """Write a folder of MLflow with a model of LightGBM."""
    folder.mkdir(parents=True)
    data = lightgbm.Dataset(TRAINED, CLASSES)
    lightgbm.train({"objective": "binary", "num_threads": 1, "verbose": -1}, data, 5).save_model(folder / "model.lgb")
    (folder / "MLmodel").write_text(mlmodel("lightgbm", {"data": "model.lgb"}, TENSOR))


def write_graph(folder: Path) -> None:
    """Write a folder of MLflow with an ONNX file that doubles four numbers."""
    folder.mkdir(parents=True)
    helper = onnx.helper
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, ["batch", 4]) for name in ("input-0", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["input-0", "input-0"], ["y"])], "g", values[:1], values[1:])
    saved = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(saved, folder / "model_of_onnx.onnx")
    (folder / "MLmodel").write_text(mlmodel("onnx", {"data": "model_of_onnx.onnx"}, TENSOR))


#: Model → what writes its folder.
WRITERS = {"table": write_table, "trees": write_trees, "leaves": write_leaves, "graph": write_graph}


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the pickle of the server makes if it is executed."""
    return tmp_path_factory.mktemp("mark") / "executed"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mark: Path) -> Iterator[ServerProcess]:
    models = tmp_path_factory.mktemp("models")
    for name, write in WRITERS.items():
        write(models / name / "1")
    (models / "refused/1").mkdir(parents=True)
    joblib.dump(MakesAFolder(mark), models / "refused/1/model.pkl")
    text = mlmodel("sklearn", {"pickled_model": "model.pkl"}, TENSOR, allow_pickle="true")
    (models / "refused/1/MLmodel").write_text(text)
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false", "--allow-pickle=other")
    with ServerProcess(models, *flags, "--strict-readiness=false") as running:
        yield running


def classes_over_http(port: int, name: str) -> list[int]:
    output = output_over_http(port, name)
    assert (output["name"], output["datatype"], output["shape"]) == ("output-0", "INT64", [5, 1])
    found: list[int] = output["data"]
    return found


def output_over_http(port: int, name: str, *, by_column: bool = True) -> dict[str, Any]:
    """Return the only output for five rows, or for four in one tensor: ONNX files have batches of four by default."""
    inputs = [{"name": each, "datatype": "FP64", "shape": [5, 1], "data": rows(5)[:, number].tolist()}
              for number, each in enumerate("abcd")]  # fmt: skip
    if not by_column:
        inputs = [{"name": "input-0", "datatype": "FP64", "shape": [4, 4], "data": rows(4).reshape(-1).tolist()}]
    url = f"http://127.0.0.1:{port}/v2/models/{name}/infer"
    with urllib.request.urlopen(url, json.dumps({"inputs": inputs}).encode()) as response:
        [output] = json.load(response)["outputs"]
    found: dict[str, Any] = output
    return found


def test_columns_over_http_and_a_tensor_in_shared_memory_give_what_the_libraries_give(server: ServerProcess) -> None:
    given = rows(5)
    expected = LINEAR.predict(pandas.DataFrame(given, columns=list("abcd")))
    assert classes_over_http(server.http_port, "table") == expected.tolist()
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        tensor = tritonclient.grpc.InferInput("input-0", list(given.shape), "FP64")
        tensor.set_data_from_numpy(given)
        alone = client.infer("trees", [tensor]).as_numpy("output-0")
        key = f"/mlflow_{os.getpid()}"
        region = shared_memory.create_shared_memory_region("trees", key, given.nbytes)
        try:
            shared_memory.set_shared_memory_region(region, [given])
            client.register_system_shared_memory("trees", key, given.nbytes)
            tensor.set_shared_memory("trees", given.nbytes)
            shared = client.infer("trees", [tensor]).as_numpy("output-0")
            client.unregister_system_shared_memory("trees")
        finally:
            shared_memory.destroy_shared_memory_region(region)
    trees = trained_trees().predict(xgboost.DMatrix(given))
    assert np.array_equal(alone.reshape(-1), trees)
    assert np.array_equal(shared.reshape(-1), trees)


@pytest.mark.parametrize("name", WRITERS)
def test_a_worker_that_is_killed_is_forked_again_and_computes(server: ServerProcess, name: str) -> None:
    expected = output_over_http(server.http_port, name, by_column=name == "table")
    for _ in range(2):
        [worker] = [psutil.Process(pid) for pid in server.workers(name)]
        assert any(word.startswith("--mark=") for word in worker.cmdline()), "it is a fork"
        worker.kill()
        worker.wait(60)
        assert output_over_http(server.http_port, name, by_column=name == "table") == expected


def test_a_pickle_in_a_folder_is_refused_and_not_executed(server: ServerProcess, mark: Path) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        [entry] = [each for each in client.get_model_repository_index() if each["name"] == "refused"]
    assert entry["state"] == "UNAVAILABLE"
    assert "start the server with --allow-pickle=refused" in entry["reason"]
    assert not mark.exists()


@pytest.mark.parametrize("name", WRITERS)
def test_two_hundred_loads_leave_nothing(server: ServerProcess, name: str) -> None:
    load_two_hundred_times(server, name)
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        client.load_model(name)


def test_a_folder_is_served_without_a_repository(tmp_path: Path) -> None:
    write_table(tmp_path / "cancer")
    with ServerProcess(tmp_path / "cancer") as running:
        expected = LINEAR.predict(pandas.DataFrame(rows(5), columns=list("abcd")))
        assert classes_over_http(running.http_port, "cancer") == expected.tolist()

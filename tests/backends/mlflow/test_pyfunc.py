"""Models that the package mlflow loads: only where it is allowed, and what their results become."""

from __future__ import annotations

import datetime
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.mlflow import pyfunc
from backends.mlflow.backend import MlflowBackend
from backends.mlflow.pyfunc import results_of
from kernel.errors import InternalError, InvalidArgument, Unavailable, Unsupported
from tests.backends.mlflow.conftest import COLUMNS, by_column, rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shm.arrays import Array
    from tests.backends.conftest import Lab
    from tests.backends.mlflow.conftest import MlflowFolder

pandas: Any = pytest.importorskip("pandas")

ALLOWED = {"allow-pickle": "m"}
X_AND_Y = [{"type": "tensor", "name": name, "tensor-spec": {"dtype": "float64", "shape": [-1, 4]}} for name in "xy"]
TWO = [{"type": "double", "name": name} for name in ("low", "high")]


class FakeMlflow:
    """Stands for the module `mlflow.pyfunc`; a model of it is a function of what it is called with."""

    def __init__(self, predict: Callable[[Any], Any]) -> None:
        self.predict = predict
        self.opened: list[str] = []

    def load_model(self, path: str) -> FakeMlflow:
        self.opened.append(path)
        return self


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, folder: MlflowFolder) -> Callable[..., MlflowBackend]:
    """Returns a backend with a model of this function and signature."""

    def load(predict: Callable[[Any], Any], *signature: Any, config: Any = None) -> MlflowBackend:
        fake = FakeMlflow(predict)
        monkeypatch.setattr(pyfunc, "pyfunc_library", lambda loader: fake)
        folder.write("python_model", {}, *signature, loader_module="mlflow.pyfunc.model")
        backend = folder.loaded(config, ALLOWED)
        assert set(fake.opened) == {str(folder.version.resolve())}
        return backend

    return load


def outputs(lab: Lab, backend: MlflowBackend, inputs: dict[str, Array]) -> dict[str, Array]:
    request = lab.request(inputs)
    backend.execute([request], lab.timings)
    return lab.outputs(request)


@pytest.mark.parametrize("allowed", ["", "false", "other"])
def test_mlflow_is_not_called_unless_pickles_are_allowed(
    lab: Lab, folder: MlflowFolder, tmp_path: Path, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMlflow(lambda rows: rows)
    monkeypatch.setattr(pyfunc, "pyfunc_library", lambda loader: fake)
    folder.write("python_model", {}, COLUMNS, loader_module="my.loader")
    config = {"parameters": {"allow-pickle": {"string_value": "true"}}}
    for method in ("complete", "verify", "load"):
        with pytest.raises(Unsupported, match=r"is loaded by 'my.loader' .* runs code .*--allow-pickle=m "):
            getattr(MlflowBackend(lab), method)(folder.arguments(config, {"allow-pickle": allowed}))
    assert not fake.opened


def test_without_mlflow_the_error_says_how_it_is_installed(
    folder: MlflowFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_PICKLE_DESERIALIZATION"):
        monkeypatch.setenv(name, "")  # so that what the load sets does not stay
    monkeypatch.setitem(sys.modules, "mlflow", None)
    folder.write("statsmodels", {}, COLUMNS)
    with pytest.raises(Unavailable, match="by 'mlflow.statsmodels' needs the package mlflow.*install mlflow-skinny"):
        folder.loaded(settings=ALLOWED)


def test_a_package_that_is_missing_is_named_with_what_to_do(
    folder: MlflowFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeedsAPackage:
        def load_model(self, path: str) -> None:
            raise ModuleNotFoundError("No module named 'prophet'")

    monkeypatch.setattr(pyfunc, "pyfunc_library", lambda loader: NeedsAPackage())
    folder.write("prophet", {}, COLUMNS)
    with pytest.raises(Unavailable, match=r"No module named 'prophet'\. Install what .*, or serve"):
        folder.loaded(settings=ALLOWED)


def test_an_environment_of_its_own_is_refused_with_what_has_one(lab: Lab, folder: MlflowFolder) -> None:
    folder.write("prophet", {}, COLUMNS)
    for method in ("complete", "verify", "load"):
        with pytest.raises(Unsupported, match=r"EXECUTION_ENV_PATH\), which only Python models can have.*model.py"):
            arguments = folder.arguments(settings=ALLOWED, EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env.tar.gz")
            getattr(MlflowBackend(lab), method)(arguments)


def test_columns_are_a_table_and_a_table_has_an_output_for_each_column(
    lab: Lab, loads: Callable[..., MlflowBackend]
) -> None:
    backend = loads(lambda table: pandas.DataFrame({"high": table.max(axis=1), "low": table.min(axis=1)}), COLUMNS, TWO)
    given = rows(3)
    found = outputs(lab, backend, by_column(given))
    assert np.array_equal(found["low"], given.min(axis=1, keepdims=True))
    assert np.array_equal(found["high"], given.max(axis=1, keepdims=True))


def test_named_tensors_are_a_dictionary(lab: Lab, loads: Callable[..., MlflowBackend]) -> None:
    backend = loads(lambda given: {"sum": given["x"] + given["y"], "first": given["x"][:, 0]}, X_AND_Y)
    found = outputs(lab, backend, {"x": rows(3), "y": rows(3, seed=2)})
    assert np.array_equal(found["sum"], rows(3) + rows(3, seed=2))
    assert np.array_equal(found["first"], rows(3)[:, :1])


def test_requests_of_a_batch_get_their_rows(lab: Lab, loads: Callable[..., MlflowBackend]) -> None:
    backend = loads(lambda given: given["x"] * given["y"], X_AND_Y)
    requests = [lab.request({"x": rows(count), "y": rows(count)}) for count in (1, 2)]
    backend.execute(requests, lab.timings)
    assert [lab.outputs(each)["output-0"].tolist() for each in requests] == [
        (rows(count) ** 2).tolist() for count in (1, 2)
    ]


def test_a_model_whose_rows_are_not_independent_is_an_error(lab: Lab, loads: Callable[..., MlflowBackend]) -> None:
    backend = loads(lambda given: given["x"].sum(axis=0, keepdims=True), X_AND_Y)
    with pytest.raises(InternalError, match="returns 1 rows for 3 .*served with max_batch_size: 0"):
        outputs(lab, backend, {"x": rows(3), "y": rows(3)})


def test_other_names_than_those_of_the_signature(lab: Lab, loads: Callable[..., MlflowBackend]) -> None:
    backend = loads(lambda table: {"a": table["a"], "b": table["b"]}, COLUMNS, TWO)
    assert list(outputs(lab, backend, by_column(rows(2)))) == ["a", "b"]
    assert ("WARNING", "model 'm' returns a, b, and not the outputs low, high of its signature") in lab.logged


def test_a_folder_of_links_is_opened_where_it_is(
    lab: Lab, folder: MlflowFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMlflow(lambda given: given["x"])
    monkeypatch.setattr(pyfunc, "pyfunc_library", lambda loader: fake)
    folder.write("python_model", {}, X_AND_Y, loader_module="mlflow.pyfunc.model")
    saved = tmp_path / "saved"
    saved.mkdir()
    (folder.version / "MLmodel").rename(saved / "MLmodel")
    (folder.version / "MLmodel").symlink_to(saved / "MLmodel")
    MlflowBackend(lab).verify(folder.arguments(folder.completed(settings=ALLOWED), ALLOWED))
    assert set(fake.opened) == {str(saved.resolve())}


def test_what_the_code_of_a_model_raises_is_an_error_of_its_request(
    lab: Lab, loads: Callable[..., MlflowBackend]
) -> None:
    class MlflowError(Exception):
        error_code = "INVALID_PARAMETER_VALUE"

    def predict(given: dict[str, Array]) -> Array:
        if given["x"].min() < 0:
            raise MlflowError("no\n  negatives")
        if given["x"].max() > 1:
            raise KeyError("missing")
        return given["x"]

    backend = loads(predict, X_AND_Y)
    with pytest.raises(InvalidArgument, match="^predict: no negatives$"):
        outputs(lab, backend, {"x": -rows(1), "y": rows(1)})
    with pytest.raises(InternalError, match="^predict failed: KeyError: 'missing'$"):
        outputs(lab, backend, {"x": rows(1) + 1, "y": rows(1)})


def test_a_folder_without_a_signature_says_what_is_missing(loads: Callable[..., MlflowBackend]) -> None:
    with pytest.raises(InvalidArgument, match=r"has no signature, .* signature=mlflow.models.infer_signature"):
        loads(lambda given: given)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (pandas.Series([1, 2]), [[1], [2]]),
        (pandas.DataFrame([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (["a", None], [["a"], [b"null"]]),
        ([{"a": 1}, {"b": 2}], [[b'{"a":1}'], [b'{"b":2}']]),
        ([[1], [2, 3]], [[b"[1]"], [b"[2,3]"]]),
        (np.array(["2026-01-02"], "datetime64[D]"), [["2026-01-02"]]),
        ([{"at": datetime.date(2026, 1, 2)}, 3], [[b'{"at":"2026-01-02"}'], [b"3"]]),
    ],
)
def test_results_become_arrays_of_rows(result: Any, expected: Any) -> None:
    found = results_of(result)
    assert not isinstance(found, dict)
    assert found.tolist() == expected


def test_rows_of_equal_names_are_an_output_for_each() -> None:
    found = results_of([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}])
    assert isinstance(found, dict)
    assert {name: array.tolist() for name, array in found.items()} == {"a": [[1], [2]], "b": [["x"], ["y"]]}


def test_a_single_value_has_no_rows() -> None:
    with pytest.raises(ValueError, match="a single value for all rows"):
        results_of(3.5)

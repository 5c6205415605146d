"""Folders that mlflow itself has saved give what `mlflow.pyfunc.load_model(...).predict` gives: `make test-mlflow`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightgbm
import mlflow.lightgbm
import mlflow.onnx
import mlflow.pyfunc
import mlflow.pytorch
import mlflow.sklearn
import mlflow.xgboost
import numpy as np
import onnx
import pandas
import pytest
import torch
import xgboost
from mlflow.models import infer_signature
from sklearn.compose import make_column_transformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from backends.base import ModelArguments
from backends.mlflow.backend import MlflowBackend
from backends.mlflow.model_folder import parse_mlmodel
from backends.mlflow.pyfunc import PyfuncPredictor
from kernel.errors import InvalidArgument, Unsupported
from tests.backends.mlflow.conftest import by_column, rows

if TYPE_CHECKING:
    from pathlib import Path

    from shm.arrays import Array
    from tests.backends.conftest import Lab

pytestmark = [
    pytest.mark.timeout(120),
    # What mlflow and the libraries say of each other's versions is not ours.
    pytest.mark.filterwarnings("ignore"),
]

TRAINED = rows(200, seed=0)
TABLE = pandas.DataFrame(TRAINED, columns=list("abcd"))
CLASSES = (TRAINED[:, 0] > 0.5).astype(int)
GIVEN = pandas.DataFrame(rows(9), columns=list("abcd"))
ALLOWED = {"allow-pickle": "true"}


class Saved:
    """A model folder, into whose version mlflow saves a model."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        self.folder = folder
        self.path = str(folder / "1")
        self.lab = lab

    def served(
        self, given: dict[str, Array], settings: dict[str, str] | None = None, **parameters: str
    ) -> dict[str, Array]:
        """Return the outputs of the folder as it is, for one request."""
        config: Any = {"name": "m", "parameters": {key: {"string_value": each} for key, each in parameters.items()}}
        backend = MlflowBackend(self.lab)
        arguments = ModelArguments(config, self.folder, 1, "m_0", backend_config=settings or {})
        completed = backend.complete(arguments)
        backend.load(ModelArguments(completed, self.folder, 1, "m_0", backend_config=settings or {}))
        request = self.lab.request(given)
        backend.execute([request], self.lab.timings)
        backend.finalize()
        return self.lab.outputs(request)

    def expected(self, given: Any) -> Any:
        """Return what mlflow gives."""
        return mlflow.pyfunc.load_model(self.path).predict(given)


@pytest.fixture
def saved(tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Saved:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")  # only mlflow reads it
    return Saved(tmp_path, lab)


def equal(found: Array, expected: Any) -> bool:
    """Whether an output is a result of mlflow, in datatype and value."""
    array = np.asarray(expected)
    return found.dtype == array.dtype and np.array_equal(found, array.reshape(found.shape))


@pytest.mark.parametrize("form", ["skops", "pickle", "cloudpickle"])
@pytest.mark.parametrize("method", ["predict", "predict_proba"])
def test_a_pipeline_of_scikit_learn_by_columns_and_as_one(saved: Saved, form: str, method: str) -> None:
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(TABLE, CLASSES)
    mlflow.sklearn.save_model(
        model,
        saved.path,
        serialization_format=form,
        signature=infer_signature(TABLE, getattr(model, method)(TABLE)),
        pyfunc_predict_fn=method,
        pip_requirements=[],
        **({"skops_trusted_types": []} if form == "skops" else {}),
    )
    inputs = by_column(GIVEN.to_numpy())
    if form != "skops":
        with pytest.raises(Unsupported, match="--allow-pickle=m "):
            saved.served(inputs)
    settings = None if form == "skops" else ALLOWED
    expected = saved.expected(GIVEN)
    assert equal(saved.served(inputs, settings)["output-0"], expected)
    assert equal(saved.served({"input-0": GIVEN.to_numpy()}, settings, inputs="tensor")["output-0"], expected)


def test_a_tensor_and_no_signature(saved: Saved) -> None:
    model = LinearRegression().fit(TRAINED, TRAINED[:, :2])
    signature = infer_signature(TRAINED, model.predict(TRAINED))
    mlflow.sklearn.save_model(model, saved.path, signature=signature, pip_requirements=[])
    assert equal(saved.served({"input-0": rows(9)}, ALLOWED)["output-0"], saved.expected(rows(9)))
    other = Saved(saved.folder / "other", saved.lab)
    other.folder.mkdir()
    mlflow.sklearn.save_model(model, other.path, pip_requirements=[])
    assert equal(other.served({"input-0": rows(9)}, ALLOWED)["output-0"], other.expected(rows(9)))


def test_a_table_of_several_types(saved: Saved) -> None:
    table = pandas.DataFrame({
        "town": ["a", "b"] * 10,
        "when": pandas.to_datetime(["2026-01-01T00:00:00", "2026-06-01T12:30:00"] * 10),
        "size": np.arange(20, dtype=np.int32),
        "open": [True, False] * 10,
    })  # fmt: skip
    columns = make_column_transformer(
        (OneHotEncoder(), ["town", "when"]), (StandardScaler(), ["size"]), ("passthrough", ["open"])
    )
    model = make_pipeline(columns, LogisticRegression()).fit(table, np.array(["yes", "no"] * 10))
    signature = infer_signature(table, pandas.DataFrame({"answer": model.predict(table)}))
    mlflow.sklearn.save_model(
        model, saved.path, signature=signature, pip_requirements=[], serialization_format="cloudpickle"
    )
    given = table[3:9]
    inputs = {
        "town": np.array([[each.encode()] for each in given["town"]], object),
        "when": np.array([[each.isoformat().encode()] for each in given["when"]], object),
        "size": given[["size"]].to_numpy(),
        "open": given[["open"]].to_numpy(),
    }
    found = saved.served(inputs, ALLOWED)["answer"]
    assert [each.decode() for each in found.reshape(-1)] == list(saved.expected(given))


def test_texts(saved: Saved) -> None:
    texts = ["good fine", "bad poor"] * 5
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, [1, 0] * 5)
    signature = infer_signature(np.array(texts), model.predict(texts))
    mlflow.sklearn.save_model(
        model, saved.path, signature=signature, pip_requirements=[], serialization_format="cloudpickle"
    )
    inputs = {"input-0": np.array([[each.encode()] for each in texts], object)}
    assert equal(saved.served(inputs, ALLOWED)["output-0"], saved.expected(np.array(texts)))


@pytest.mark.parametrize("form", ["ubj", "json"])
@pytest.mark.parametrize("kind", ["Booster", "XGBClassifier", "XGBRegressor"])
def test_models_of_xgboost(saved: Saved, kind: str, form: str) -> None:
    model: Any
    if kind == "Booster":
        model = xgboost.train({"objective": "binary:logistic"}, xgboost.DMatrix(TABLE, CLASSES), 10)
        result = model.predict(xgboost.DMatrix(TABLE))
    else:
        model = getattr(xgboost, kind)(n_estimators=10).fit(TABLE, CLASSES)
        result = model.predict(TABLE)
    signature = infer_signature(TABLE, result)
    mlflow.xgboost.save_model(model, saved.path, signature=signature, model_format=form, pip_requirements=[])
    given = GIVEN.copy()
    given.iloc[0, 1] = np.nan
    assert equal(saved.served(by_column(given.to_numpy()))["output-0"], saved.expected(given))


@pytest.mark.parametrize("kind", ["Booster", "LGBMClassifier"])
def test_models_of_lightgbm(saved: Saved, kind: str) -> None:
    model: Any
    if kind == "Booster":
        model = lightgbm.train({"objective": "binary", "verbose": -1}, lightgbm.Dataset(TABLE, CLASSES), 10)
    else:
        model = lightgbm.LGBMClassifier(n_estimators=10, verbose=-1).fit(TABLE, CLASSES)
    signature = infer_signature(TABLE, model.predict(TABLE))
    mlflow.lightgbm.save_model(model, saved.path, signature=signature, pip_requirements=[])
    found = saved.served(by_column(GIVEN.to_numpy()), ALLOWED)["output-0"]
    assert equal(found, saved.expected(GIVEN))


def test_a_model_of_onnx(saved: Saved) -> None:
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])]
    values = [helper.make_tensor_value_info(name, kind, ["batch", 4]) for name in "xyz"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    given = rows(3).astype(np.float32)
    signature = infer_signature({"x": given}, {"y": given, "z": given})
    mlflow.onnx.save_model(model, saved.path, signature=signature, pip_requirements=[])
    found, expected = saved.served({"x": given}), saved.expected({"x": given})
    assert found.keys() == expected.keys()
    assert all(equal(found[name], expected[name]) for name in found)


class Linear(torch.nn.Module):  # type: ignore[misc]  # torch is not installed where mypy runs
    """Four numbers become two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(self.layer(x), dim=1)


FLOATS = rows(9).astype(np.float32)


@pytest.mark.parametrize("kind", ["script", "module", "pt2"])
def test_models_of_pytorch_by_tensor_and_by_column(saved: Saved, kind: str) -> None:
    """Of scripted and exported models no pickle is opened; the others need the flag."""
    module = Linear().eval()
    model = torch.jit.script(module) if kind == "script" else module
    more: dict[str, Any] = {"serialization_format": "pickle"}
    if kind == "pt2":
        more = {"serialization_format": "pt2", "input_example": FLOATS}
    signature = infer_signature(FLOATS, module(torch.from_numpy(FLOATS)).detach().numpy())
    mlflow.pytorch.save_model(model, saved.path, signature=signature, pip_requirements=[], **more)
    settings = ALLOWED if kind == "module" else None
    if settings:
        with pytest.raises(Unsupported, match="is a pickle .*--allow-pickle=m "):
            saved.served({"input-0": FLOATS})
    assert equal(saved.served({"input-0": FLOATS}, settings)["output-0"], saved.expected(FLOATS))
    if kind == "pt2":  # which takes no columns
        assert saved.served({"input-0": FLOATS[:1]}, settings)["output-0"].shape == (1, 2), "any number of rows"
        return
    columns = Saved(saved.folder / "columns", saved.lab)
    columns.folder.mkdir()
    signature = infer_signature(TABLE, CLASSES)
    mlflow.pytorch.save_model(model, columns.path, signature=signature, pip_requirements=[], **more)
    found = columns.served(by_column(GIVEN.to_numpy()), settings)
    assert equal(np.hstack(list(found.values())), columns.expected(GIVEN).to_numpy())


class Scores(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """A table becomes a table with a text and a number for each row."""

    def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
        total = model_input.sum(axis=1)
        return pandas.DataFrame({"word": np.where(total > 2, "high", "low"), "total": total})


class Sums(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Two named tensors become two."""

    def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
        return {"sum": model_input["x"] + model_input["y"], "rows": model_input["x"].sum(axis=1)}


class Lengths(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Texts become their lengths."""

    def predict(self, model_input: list[str], params: Any = None) -> list[int]:
        return [len(each) for each in model_input]


def test_a_python_model_by_columns_needs_the_flag_and_gives_a_table(saved: Saved) -> None:
    result = Scores().predict(None, TABLE)
    mlflow.pyfunc.save_model(
        saved.path, python_model=Scores(), signature=infer_signature(TABLE, result), pip_requirements=[]
    )
    inputs = by_column(GIVEN.to_numpy())
    with pytest.raises(Unsupported, match="is loaded by 'mlflow.pyfunc.model'.*--allow-pickle=m "):
        saved.served(inputs)
    found, expected = saved.served(inputs, ALLOWED), saved.expected(GIVEN)
    assert list(found) == ["word", "total"]
    assert [each.decode() for each in found["word"].reshape(-1)] == list(expected["word"])
    assert equal(found["total"], expected["total"])


def test_a_python_model_of_named_tensors(saved: Saved) -> None:
    given = {"x": rows(9), "y": rows(9, seed=2)}
    signature = infer_signature(given, Sums().predict(None, given))
    mlflow.pyfunc.save_model(saved.path, python_model=Sums(), signature=signature, pip_requirements=[])
    found, expected = saved.served(given, ALLOWED), saved.expected(given)
    assert found.keys() == expected.keys()
    assert all(equal(found[name], expected[name]) for name in found)


def test_a_python_model_of_texts_has_the_signature_of_its_annotations(saved: Saved) -> None:
    mlflow.pyfunc.save_model(saved.path, python_model=Lengths(), pip_requirements=[], input_example=["a", "bc"])
    found = saved.served({"input-0": np.array([[b"one"], [b"fifteen letters"]], object)}, ALLOWED)
    assert found["output-0"].reshape(-1).tolist() == saved.expected(["one", "fifteen letters"]) == [3, 15]


def test_a_loader_in_the_code_of_a_folder(saved: Saved) -> None:
    code = saved.folder / "doubling_loader.py"
    code.write_text(
        "class Doubled:\n    def predict(self, data, params=None):\n        return data * 2\n\n"
        "def _load_pyfunc(path):\n    return Doubled()\n"
    )
    mlflow.pyfunc.save_model(
        saved.path,
        loader_module="doubling_loader",
        code_paths=[str(code)],
        signature=infer_signature(TRAINED, TRAINED),
        pip_requirements=[],
    )
    assert equal(saved.served({"input-0": rows(5)}, ALLOWED)["output-0"], saved.expected(rows(5)))


def test_rows_that_mlflow_refuses_are_wrong_inputs(saved: Saved) -> None:
    signature = infer_signature(TABLE, Scores().predict(None, TABLE))
    mlflow.pyfunc.save_model(saved.path, python_model=Scores(), signature=signature, pip_requirements=[])
    text = (saved.folder / "1/MLmodel").read_text()
    found = parse_mlmodel(text, "m")
    arguments = ModelArguments({"name": "m"}, saved.folder, 1, "m_0", backend_config=ALLOWED)
    predictor = PyfuncPredictor(arguments, found)
    with pytest.raises(InvalidArgument, match=r"predict: .* Model is missing inputs \['c', 'd'\]"):
        predictor.predict(GIVEN[["a", "b"]])

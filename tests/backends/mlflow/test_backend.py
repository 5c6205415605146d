"""Folders of MLflow give what the libraries' own calls give, by column and as one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sklearn.compose import make_column_transformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from backends.base import ModelArguments
from backends.mlflow import library
from backends.mlflow.backend import MlflowBackend
from kernel.errors import InternalError, InvalidArgument, ServingError, Unavailable, Unsupported
from tests.backends.mlflow.conftest import COLUMNS, LABEL, TENSOR, by_column, rows
from tests.backends.sklearn.makes_a_folder import MakesAFolder

if TYPE_CHECKING:
    from pathlib import Path

    from shm.arrays import Array
    from tests.backends.conftest import Lab
    from tests.backends.mlflow.conftest import MlflowFolder

joblib: Any = pytest.importorskip("joblib")
lightgbm: Any = pytest.importorskip("lightgbm")
pandas: Any = pytest.importorskip("pandas")
skops: Any = pytest.importorskip("skops.io", reason="needs the extra sklearn")
xgboost: Any = pytest.importorskip("xgboost")

ALLOWED = {"allow-pickle": "true"}
TRAINED = rows(200, seed=0)
TABLE = pandas.DataFrame(TRAINED, columns=list("abcd"))
CLASSES = (TRAINED[:, 0] > 0.5).astype(int)
SKOPS = {"pickled_model": "model.skops", "serialization_format": "skops"}


def write_sklearn(folder: MlflowFolder, *signature: Any, fitted: Any = TRAINED, **general: Any) -> Any:
    """Write a folder of a classifier, and return it."""
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(fitted, CLASSES)
    skops.dump(model, folder.version / "model.skops")
    folder.write("sklearn", SKOPS, *signature, **general)
    return model


def write_xgboost(folder: MlflowFolder, kind: str, *signature: Any, fitted: Any = TRAINED) -> Any:
    model = xgboost.XGBClassifier(n_estimators=5).fit(fitted, CLASSES)
    model.save_model(folder.version / "model.ubj")
    folder.write("xgboost", {"data": "model.ubj", "model_class": kind, "model_format": "ubj"}, *signature)
    return model


def write_lightgbm(folder: MlflowFolder, *signature: Any) -> Any:
    data = lightgbm.Dataset(TABLE, CLASSES)
    model = lightgbm.train({"objective": "binary", "num_threads": 1, "verbose": -1}, data, 5)
    model.save_model(folder.version / "model.lgb")
    folder.write("lightgbm", {"data": "model.lgb", "model_class": "lightgbm.basic.Booster"}, *signature)
    return model


def outputs(lab: Lab, backend: MlflowBackend, **inputs: Array) -> dict[str, Array]:
    request = lab.request({name.replace("_", "-"): array for name, array in inputs.items()})
    backend.execute([request], lab.timings)
    return lab.outputs(request)


def test_columns_are_inputs_in_any_order_and_the_signature_names_the_output(lab: Lab, folder: MlflowFolder) -> None:
    label = [{"type": "long", "name": "label", "required": True}]
    model = write_sklearn(folder, COLUMNS, label, fitted=TABLE)
    completed = folder.completed()
    assert completed["max_batch_size"] == 1024
    assert completed["dynamic_batching"] == {}
    assert completed["input"] == [{"name": name, "data_type": "TYPE_FP64", "dims": [1]} for name in "abcd"]
    assert completed["output"] == [{"name": "label", "data_type": "TYPE_INT64", "dims": [1]}]
    found = outputs(lab, folder.loaded(), **dict(reversed(by_column(rows(9)).items())))
    expected = model.predict(pandas.DataFrame(rows(9), columns=list("abcd")))
    assert np.array_equal(found["label"].reshape(-1), expected)


@pytest.mark.parametrize("method", ["predict", "predict_proba", "decision_function"])
def test_columns_of_one_type_can_be_one_tensor_and_the_folder_chooses_the_method(
    lab: Lab, folder: MlflowFolder, method: str
) -> None:
    model = write_sklearn(folder, COLUMNS, None, fitted=TABLE, predict_fn=method)
    assert folder.completed(inputs="tensor")["input"] == [{"name": "input-0", "data_type": "TYPE_FP64", "dims": [4]}]
    found = outputs(lab, folder.loaded(inputs="tensor"), input_0=rows(9))["output-0"]
    expected = getattr(model, method)(pandas.DataFrame(rows(9), columns=list("abcd")))
    assert np.array_equal(found, expected.reshape(9, -1))


@pytest.mark.parametrize("kind", ["xgboost.core.Booster", "xgboost.sklearn.XGBClassifier"])
@pytest.mark.parametrize("signature", [COLUMNS, TENSOR, None], ids=["columns", "tensor", "none"])
def test_a_model_of_xgboost_gives_what_its_class_gives(
    lab: Lab, folder: MlflowFolder, kind: str, signature: Any
) -> None:
    model = write_xgboost(folder, kind, signature, fitted=TABLE if signature is COLUMNS else TRAINED)
    given = rows(9)
    given[0, 1] = np.nan  # a missing value
    inputs = by_column(given) if signature is COLUMNS else {"input_0": given}
    found = outputs(lab, folder.loaded(), **inputs)["output-0"]
    if kind == "xgboost.core.Booster":
        names = list("abcd") if signature is COLUMNS else None
        expected = model.get_booster().predict(xgboost.DMatrix(given, feature_names=names))
    else:
        expected = model.predict(given)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected.reshape(-1, 1))


@pytest.mark.parametrize("signature", [COLUMNS, TENSOR, None], ids=["columns", "tensor", "none"])
def test_a_model_of_lightgbm_gives_what_its_booster_gives(lab: Lab, folder: MlflowFolder, signature: Any) -> None:
    model = write_lightgbm(folder, signature)
    inputs = by_column(rows(9)) if signature is COLUMNS else {"input_0": rows(9)}
    found = outputs(lab, folder.loaded(), **inputs)["output-0"]
    assert np.array_equal(found.reshape(-1), model.predict(rows(9), num_threads=1))


def test_an_estimator_of_lightgbm_is_opened_as_one_of_scikit_learn(lab: Lab, folder: MlflowFolder) -> None:
    model = lightgbm.LGBMClassifier(n_estimators=3, verbose=-1).fit(TABLE, CLASSES)
    joblib.dump(model, folder.version / "model.pkl")
    kind = "lightgbm.sklearn.LGBMClassifier"
    folder.write("lightgbm", {"data": "model.pkl", "model_class": kind}, COLUMNS, LABEL)
    with pytest.raises(Unsupported, match="--allow-pickle=m "):
        folder.loaded()
    found = outputs(lab, folder.loaded(settings=ALLOWED), **by_column(rows(9)))["output-0"]
    expected = model.predict(pandas.DataFrame(rows(9), columns=list("abcd")))
    assert np.array_equal(found.reshape(-1), expected)


def test_an_onnx_file_keeps_its_own_tensors(lab: Lab, folder: MlflowFolder) -> None:
    onnx: Any = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    values = [helper.make_tensor_value_info(name, kind, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    saved = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder.version / "data").mkdir()
    onnx.save(saved, folder.version / "data/double.onnx")
    folder.write("onnx", {"data": "data/double.onnx"}, TENSOR)
    backend = folder.loaded()
    given = rows(3).astype(np.float32)
    assert np.array_equal(outputs(lab, backend, x=given)["y"], given + given)
    backend.finalize()
    with pytest.raises(InvalidArgument, match="whose inputs are those of the ONNX file"):
        folder.loaded(inputs="columns")


def test_columns_of_all_types_become_a_table(lab: Lab, folder: MlflowFolder) -> None:
    table = pandas.DataFrame(
        {
            "town": ["a", "b"] * 10,
            "when": pandas.to_datetime(["2026-01-01T00:00:00", "2026-06-01T12:30:00"] * 10),
            "size": np.arange(20, dtype=np.int32),
            "open": [True, False] * 10,
        }
    )
    columns = make_column_transformer(
        (OneHotEncoder(), ["town", "when"]), (StandardScaler(), ["size"]), ("passthrough", ["open"])
    )
    model = make_pipeline(columns, LogisticRegression()).fit(table, table["open"])
    joblib.dump(model, folder.version / "model.pkl")
    types = zip(table, ["string", "datetime", "integer", "boolean"], strict=True)
    signature = [{"name": name, "type": kind, "required": True} for name, kind in types]
    folder.write("sklearn", {"pickled_model": "model.pkl"}, signature, [{"name": "y", "type": "boolean"}])
    completed = folder.completed(settings=ALLOWED)  # "text" is no town: the output is that of the signature
    assert [each["data_type"] for each in completed["input"]] == [
        "TYPE_STRING",
        "TYPE_STRING",
        "TYPE_INT32",
        "TYPE_BOOL",
    ]
    assert completed["output"] == [{"name": "y", "data_type": "TYPE_BOOL", "dims": [1]}]
    backend = folder.loaded(settings=ALLOWED)
    inputs = {
        "town": np.array([[b"b"], [b"a"]], object),
        "when": np.array([[b"2026-06-01T12:30"], [b"2026-01-01"]], object),
        "size": np.array([[4], [9]], np.int32),
        "open": np.array([[False], [True]]),
    }
    assert outputs(lab, backend, **inputs)["y"].reshape(-1).tolist() == [False, True]
    with pytest.raises(InvalidArgument, match="column 'when' has a text that is no time of ISO 8601"):
        outputs(lab, backend, **{**inputs, "when": np.array([[b"soon"], [b"2026"]], object)})
    with pytest.raises(InvalidArgument, match="a text is not UTF-8"):
        outputs(lab, backend, **{**inputs, "town": np.array([[b"\xff"], [b"a"]], object)})
    with pytest.raises(InvalidArgument, match="they are of the types string, datetime, integer, boolean"):
        folder.loaded(settings=ALLOWED, inputs="tensor")


def test_texts_are_an_input(lab: Lab, folder: MlflowFolder) -> None:
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["good fine", "bad poor"] * 5, [1, 0] * 5)
    joblib.dump(model, folder.version / "model.pkl")
    texts = np.array([[b"good"], [b"poor thing"]], object)
    for signature in ([{"type": "tensor", "tensor-spec": {"dtype": "object", "shape": [-1]}}], None):
        folder.write("sklearn", {"pickled_model": "model.pkl"}, signature, None)
        backend = folder.loaded(settings=ALLOWED)
        assert outputs(lab, backend, input_0=texts)["output-0"].reshape(-1).tolist() == [1, 0]


def test_a_row_has_the_same_result_alone_and_in_a_batch(lab: Lab, folder: MlflowFolder) -> None:
    model = write_xgboost(folder, "xgboost.core.Booster", TENSOR)
    backend = folder.loaded()
    parts = [rows(1), rows(0), rows(170, 3)]
    requests = [lab.request({"input-0": part}) for part in parts]
    backend.execute(requests, lab.timings)
    for part, request in zip(parts, requests, strict=True):
        expected = model.get_booster().predict(xgboost.DMatrix(part)) if len(part) else np.zeros(0, np.float32)
        assert np.array_equal(lab.outputs(request)["output-0"], expected.reshape(-1, 1))


def test_a_wrong_row_fails_its_own_request(lab: Lab, folder: MlflowFolder) -> None:
    write_sklearn(folder, COLUMNS, fitted=TABLE)
    backend = folder.loaded()
    wrong = rows(1)
    wrong[0, 0] = np.nan
    requests = [lab.request(by_column(rows(1))), lab.request(by_column(wrong))]
    backend.execute(requests, lab.timings)
    assert lab.outputs(requests[0])["output-0"].shape == (1, 1)
    assert lab.error(requests[1]).message.startswith("predict: Input X contains NaN")


@pytest.mark.parametrize("write", [write_sklearn, lambda *args: write_xgboost(args[0], "xgboost.core.Booster", args[1]),
                                   write_lightgbm])  # fmt: skip
def test_rows_of_a_wrong_width_are_refused(lab: Lab, folder: MlflowFolder, write: Any) -> None:
    write(folder, TENSOR)
    config = {
        "max_batch_size": 8,
        "input": [{"name": "input-0", "data_type": "TYPE_FP64", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP64", "dims": [-1]}],
    }
    backend = folder.loaded(config)
    for width in (3, 5):
        with pytest.raises(InvalidArgument, match=rf"shape \[2, {width}\]; expected \[4\] for each row"):
            outputs(lab, backend, input_0=np.zeros((2, width)))


def test_an_optional_column_may_be_left_out(lab: Lab, folder: MlflowFolder) -> None:
    write_sklearn(folder, [*COLUMNS[:3], {**COLUMNS[3], "required": False}], fitted=TABLE)
    assert folder.completed()["input"][3] == {"name": "d", "data_type": "TYPE_FP64", "dims": [1], "optional": True}
    inputs = by_column(rows(2))
    del inputs["d"]
    with pytest.raises(InvalidArgument, match="yet now missing:\n- d"):
        outputs(lab, folder.loaded(), **inputs)  # the estimator needs it, and says so, as with MLflow


def test_what_the_signature_says_of_the_outputs_is_compared_with_the_model(lab: Lab, folder: MlflowFolder) -> None:
    several = [{"type": "double", "name": "no"}, {"type": "double", "name": "yes"}]
    model = write_sklearn(folder, TENSOR, several, predict_fn="predict_proba")
    found = outputs(lab, folder.loaded(), input_0=rows(5))
    assert np.array_equal(np.hstack([found["no"], found["yes"]]), model.predict_proba(rows(5)))
    subset = {"output": [{"name": "yes", "data_type": "TYPE_FP32", "dims": [1]}]}
    found = outputs(lab, folder.loaded(subset), input_0=rows(5))
    assert np.allclose(found["yes"].reshape(-1), model.predict_proba(rows(5))[:, 1])
    write_sklearn(folder, TENSOR, several)
    assert [each["name"] for each in folder.completed()["output"]] == ["output-0"]
    assert any("not the 2 columns of its signature" in text for _, text in lab.logged)
    write_sklearn(folder, TENSOR, several[:1])
    assert folder.completed()["output"] == [{"name": "no", "data_type": "TYPE_INT64", "dims": [1]}]
    assert ("WARNING", "output 'no' of model 'm' is INT64, and not FP64 as in its signature") in lab.logged


def test_a_fixed_first_dimension_is_no_batch(lab: Lab, folder: MlflowFolder) -> None:
    fixed = [{"type": "tensor", "name": "x", "tensor-spec": {"dtype": "float64", "shape": [3, 4]}}]
    model = write_sklearn(folder, fixed)
    assert folder.completed()["max_batch_size"] == 0
    found = outputs(lab, folder.loaded(), x=rows(3))["output-0"]
    assert np.array_equal(found.reshape(-1), model.predict(rows(3)))


def test_a_complete_configuration_without_batches_is_taken(lab: Lab, folder: MlflowFolder) -> None:
    model = write_sklearn(folder, COLUMNS, fitted=TABLE)
    config = {
        "input": [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]} for name in "abcd"],
        "output": [{"name": "class", "data_type": "TYPE_INT64", "dims": [-1, 1]}],
    }
    given = rows(4).astype(np.float32)
    inputs = {name: array.reshape(-1) for name, array in by_column(given).items()}
    found = outputs(lab, folder.loaded(config), **inputs)["class"]
    expected = model.predict(pandas.DataFrame(given.astype(float), columns=list("abcd")))
    assert np.array_equal(found.reshape(-1), expected)
    with pytest.raises(InvalidArgument, match="the columns have different numbers of rows"):
        outputs(lab, folder.loaded(config), **{**inputs, "a": inputs["a"][:1]})


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "parameters", "text"),
    [
        ({"input": [{"name": "x", "data_type": "TYPE_FP64", "dims": [4]}]}, {}, "are x; expected a, b, c, d"),
        ({"input": [{"name": n, "data_type": "TYPE_STRING", "dims": [1]} for n in "abcd"]}, {},
         "is BYTES; expected FP64, or what becomes it without a loss"),
        ({"input": [{"name": n, "data_type": "TYPE_FP64", "dims": [2]} for n in "abcd"]}, {}, "has dims [2]"),
        ({"input": [{"name": "input-0", "data_type": "TYPE_FP64", "dims": [3]}]}, {"inputs": "tensor"}, "has dims [3]"),
        ({}, {"inputs": "rows"}, "is 'rows'; expected columns or tensor"),
        ({"output": [{"name": n, "data_type": "TYPE_INT64", "dims": [1]} for n in "yz"]}, {},
         "are y, z; expected output-0"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_the_folder_is_refused(
    folder: MlflowFolder, config: dict[str, Any], parameters: dict[str, str], text: str
) -> None:
    write_sklearn(folder, COLUMNS, fitted=TABLE)
    with pytest.raises(ServingError) as failure:
        folder.loaded(config, None, **parameters)
    assert text in failure.value.message


def test_a_signature_that_does_not_fit_the_model_is_refused(folder: MlflowFolder) -> None:
    write_xgboost(folder, "xgboost.core.Booster", list(reversed(COLUMNS)), fitted=TABLE)
    with pytest.raises(InvalidArgument, match="are d, c, b, a; expected those that it was fitted with: a, b, c, d"):
        folder.loaded()
    write_lightgbm(folder, COLUMNS[:3])
    with pytest.raises(InvalidArgument, match="has 3 columns; expected 4"):
        folder.loaded()
    write_lightgbm(folder, [{"type": "string", "name": "a"}, *COLUMNS[1:]])
    with pytest.raises(InvalidArgument, match="the columns a in the signature of model 'm' are no numbers"):
        folder.loaded()
    write_sklearn(folder, [{"type": "tensor", "tensor-spec": {"dtype": "float64", "shape": [-1, 7]}}])
    with pytest.raises(InvalidArgument, match="has 7 columns; expected 4"):
        folder.loaded()
    write_sklearn(folder, [*TENSOR, *TENSOR])
    with pytest.raises(Unsupported, match="has 2 tensors as inputs"):
        folder.loaded()
    write_sklearn(folder, TENSOR, predict_fn="fit")
    with pytest.raises(Unsupported, match="is called by 'fit'.*expected one of predict, predict_proba"):
        folder.loaded()
    write_sklearn(folder, TENSOR)
    with pytest.raises(InvalidArgument, match="its signature is a tensor"):
        folder.loaded(inputs="columns")
    write_xgboost(folder, "os.system")
    with pytest.raises(Unsupported, match="is of the class 'os.system'.*supported are xgboost.core.Booster"):
        folder.loaded()


@pytest.mark.parametrize("allowed", ["", "false", "other"])
def test_nothing_of_a_pickle_is_executed_unless_it_is_allowed(
    lab: Lab, folder: MlflowFolder, tmp_path: Path, allowed: str
) -> None:
    mark = tmp_path / "executed"
    joblib.dump(MakesAFolder(mark), folder.version / "model.pkl")
    folder.write("sklearn", {"pickled_model": "model.pkl", "serialization_format": "skops"}, TENSOR)
    config = {"parameters": {"allow-pickle": {"string_value": "true"}}}
    for method in ("complete", "verify", "load"):
        with pytest.raises(Unsupported, match="is a pickle .*--allow-pickle=m "):
            getattr(MlflowBackend(lab), method)(folder.arguments(config, {"allow-pickle": allowed}))
    assert not mark.exists()
    with pytest.raises(InvalidArgument, match="has none of the methods predict"):
        folder.loaded(settings={"allow-pickle": "x, m"})
    assert mark.exists(), "the pickle is one that runs code"


def test_types_that_the_folder_trusts_are_not_those_of_the_server(folder: MlflowFolder) -> None:
    from sklearn.preprocessing import FunctionTransformer

    name = f"{rows.__module__}.rows"
    skops.dump(make_pipeline(FunctionTransformer(rows), LinearRegression()), folder.version / "model.skops")
    folder.write("sklearn", {**SKOPS, "skops_trusted_types": [name]}, TENSOR)
    with pytest.raises(Unsupported, match=f"does not trust: {name}.*--backend-config=mlflow,trusted-types={name}"):
        folder.loaded({"backend": "mlflow"})


@pytest.mark.parametrize("flavour", ["sklearn", "xgboost", "lightgbm"])
def test_a_damaged_file_is_an_error_of_its_load(folder: MlflowFolder, flavour: str) -> None:
    write = {"sklearn": write_sklearn, "lightgbm": write_lightgbm}.get(flavour)
    if write is not None:
        write(folder, TENSOR)
    else:
        write_xgboost(folder, "xgboost.core.Booster", TENSOR)
    [path] = [each for each in folder.version.iterdir() if each.name != "MLmodel"]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InternalError, match="failed to load model 'm'"):
        folder.loaded()


def test_without_a_library_the_error_says_how_it_is_installed(
    folder: MlflowFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ImportError("none")
    write_sklearn(folder, COLUMNS, fitted=TABLE)
    with monkeypatch.context() as without:
        without.setitem(library.imported, "pandas", missing)
        with pytest.raises(Unavailable, match=r"needs pandas.*pip install '.\[mlflow\]'"):
            folder.loaded()
        without.setitem(library.imported, "yaml", missing)
        with pytest.raises(Unavailable, match=r"needs PyYAML.*pip install '.\[mlflow\]'"):
            folder.loaded()
    write_xgboost(folder, "xgboost.core.Booster", TENSOR)
    monkeypatch.setattr(library, "optional_library", lambda name: None)
    with pytest.raises(Unavailable, match="needs xgboost.*pip install xgboost-cpu"):
        folder.loaded()


def test_an_instance_on_a_gpu_is_refused(lab: Lab, folder: MlflowFolder, tmp_path: Path) -> None:
    write_sklearn(folder, TENSOR)
    with pytest.raises(Unsupported, match="m_0' is of KIND_GPU.*computes on the CPU"):
        MlflowBackend(lab).load(ModelArguments({"name": "m"}, tmp_path, 1, "m_0", "GPU"))

"""Estimators of scikit-learn give what their own methods give; pickles are opened only where they are allowed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.compose import make_column_transformer
from sklearn.ensemble import IsolationForest, RandomForestClassifier, RandomForestRegressor, VotingClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from backends.sklearn import library
from backends.sklearn.backend import SklearnBackend
from backends.sklearn.estimator import use_one_thread
from kernel.errors import InternalError, InvalidArgument, ServingError, Unavailable, Unsupported
from tests.backends.sklearn.conftest import ALLOWED, FEATURES, SklearnModels, rows, words
from tests.backends.sklearn.makes_a_folder import MakesAFolder
from tests.docs.documents import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from shm.arrays import Array
    from tests.backends.conftest import Lab

joblib: Any = pytest.importorskip("joblib")
skops: Any = pytest.importorskip("skops.io", reason="needs the extra sklearn")
pandas: Any = pytest.importorskip("pandas")

TRAINED = rows(200, seed=0)


def classifier() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression()).fit(TRAINED, words(TRAINED))


def outputs(lab: Lab, backend: SklearnBackend, *wanted: str, **inputs: Array) -> dict[str, Array]:
    request = lab.request(inputs, outputs=wanted)
    backend.execute([request], lab.timings)
    return lab.outputs(request)


@pytest.mark.parametrize("name", ["model.skops", "model.joblib", "model.pkl", "model.pickle"])
def test_every_format_gives_what_the_estimator_gives(lab: Lab, models: SklearnModels, name: str) -> None:
    model = classifier()
    (skops.dump if name.endswith("skops") else joblib.dump)(model, models.version / name)
    found = outputs(lab, models.loaded(settings=ALLOWED), input=rows(9))
    assert [each.decode() for each in found["predict"].reshape(-1)] == model.predict(rows(9)).tolist()
    assert np.array_equal(found["predict_proba"], model.predict_proba(rows(9)))


def test_the_configuration_is_completed_from_the_estimator(lab: Lab, models: SklearnModels) -> None:
    skops.dump(classifier(), models.version / "model.skops")
    completed = SklearnBackend(lab).complete(models.arguments())
    assert completed["max_batch_size"] == 1024
    assert completed["dynamic_batching"] == {}
    assert completed["input"] == [{"name": "input", "data_type": "TYPE_FP64", "dims": [FEATURES]}]
    assert completed["output"] == [
        {"name": "predict", "data_type": "TYPE_STRING", "dims": [1]},
        {"name": "predict_proba", "data_type": "TYPE_FP64", "dims": [2]},
    ]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (LinearRegression(), [("predict", "TYPE_FP64", 2)]),
        (StandardScaler(), [("transform", "TYPE_FP64", FEATURES)]),
        (IsolationForest(n_estimators=3), [("predict", "TYPE_INT64", 1)]),
        (KMeans(2, n_init=1), [("predict", "TYPE_INT32", 1)]),
        (RandomForestClassifier(3, n_jobs=-1), [("predict", "TYPE_INT64", 2)]),  # of two targets: a list of arrays
    ],
    ids=["two targets", "transformer", "outliers", "clusters", "two classes"],
)
def test_outputs_follow_from_what_the_estimator_returns(
    lab: Lab, models: SklearnModels, estimator: Any, expected: list[tuple[str, str, int]]
) -> None:
    targets = TRAINED[:, :2] if "Linear" in type(estimator).__name__ else (TRAINED[:, :2] > 0.5).astype(int)
    joblib.dump(estimator.fit(TRAINED, targets), models.version / "model.joblib")
    completed = SklearnBackend(lab).complete(models.arguments(settings=ALLOWED))
    assert [(each["name"], each["data_type"], each["dims"][0]) for each in completed["output"]] == expected
    backend = models.loaded(settings=ALLOWED)
    method, _, width = expected[0]
    found = outputs(lab, backend, input=rows(6))[method]
    assert np.allclose(found, getattr(estimator, method)(rows(6)).reshape(6, width))


def test_requested_outputs_choose_the_methods(lab: Lab, models: SklearnModels) -> None:
    model = classifier()
    skops.dump(model, models.version / "model.skops")
    config = {
        "output": [
            {"name": "predict_proba", "data_type": "TYPE_FP32", "dims": [2]},
            {"name": "decision_function", "data_type": "TYPE_FP64", "dims": [1]},
        ]
    }
    backend = models.loaded(config)
    assert outputs(lab, backend, "decision_function", input=rows(3)).keys() == {"decision_function"}
    found = outputs(lab, backend, input=rows(3))
    assert np.allclose(found["decision_function"].reshape(-1), model.decision_function(rows(3)))
    assert found["predict_proba"].dtype == np.float32


def test_texts_are_an_input(lab: Lab, models: SklearnModels) -> None:
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["good fine", "bad poor"] * 5, [1, 0] * 5)
    joblib.dump(model, models.version / "model.joblib")
    backend = models.loaded(settings=ALLOWED)
    found = outputs(lab, backend, input=np.array([[b"good"], [b"poor thing"]], object))
    assert found["predict"].reshape(-1).tolist() == [1, 0]
    with pytest.raises(InvalidArgument, match="a text is not UTF-8"):
        outputs(lab, backend, input=np.array([[b"\xff"]], object))


def test_columns_can_be_inputs_and_become_a_table(lab: Lab, models: SklearnModels) -> None:
    table = pandas.DataFrame({"size": [1.0, 2.0, 30.0, 40.0] * 5, "town": ["a", "b", "a", "b"] * 5})
    columns = make_column_transformer((StandardScaler(), ["size"]), (OneHotEncoder(), ["town"]))
    model = make_pipeline(columns, LogisticRegression()).fit(table, [0, 0, 1, 1] * 5)
    joblib.dump(model, models.version / "model.joblib")
    config: dict[str, Any] = {
        "max_batch_size": 8,
        "input": [
            {"name": "town", "data_type": "TYPE_STRING", "dims": [1]},
            {"name": "size", "data_type": "TYPE_FP64", "dims": [1]},
        ],
        "output": [{"name": "predict_proba", "data_type": "TYPE_FP64", "dims": [2]}],
    }
    backend = models.loaded(config, ALLOWED, inputs="columns")
    given = pandas.DataFrame({"size": [1.0, 35.0], "town": ["b", "a"]})
    town = np.array([[b"b"], [b"a"]], object)
    found = outputs(lab, backend, town=town, size=np.array([[1.0], [35.0]]))
    assert np.array_equal(found["predict_proba"], model.predict_proba(given))
    with pytest.raises(InvalidArgument, match="expected the columns that it was fitted with: size, town"):
        models.loaded({**config, "input": config["input"][:1]}, ALLOWED, inputs="columns")


def test_a_pipeline_that_selects_columns_by_name_needs_no_configuration(lab: Lab, models: SklearnModels) -> None:
    table = pandas.DataFrame({"size": [1.0, 2.0, 30.0, 40.0] * 5, "town": ["a", "b"] * 10, "rooms": [2, 3] * 10})
    texts = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder())
    columns = make_column_transformer((StandardScaler(), ["size"]), (texts, ["town"]), (OneHotEncoder(), ["rooms"]))
    model = make_pipeline(columns, LogisticRegression()).fit(table, [0, 0, 1, 1] * 5)
    skops.dump(GridSearchCV(model, {}, cv=2).fit(table, [0, 0, 1, 1] * 5), models.version / "model.skops")
    completed = SklearnBackend(lab).complete(models.arguments())
    assert completed["input"] == [
        {"name": "size", "data_type": "TYPE_FP64", "dims": [1]},
        {"name": "town", "data_type": "TYPE_STRING", "dims": [1]},
        {"name": "rooms", "data_type": "TYPE_FP64", "dims": [1]},
    ]
    assert [each["name"] for each in completed["output"]] == ["predict", "predict_proba"]
    given = pandas.DataFrame({"size": [1.0, 35.0], "town": ["b", "a"], "rooms": [2.0, 3.0]})
    town = np.array([[b"b"], [b"a"]], object)
    size, rooms = np.array([[1.0], [35.0]]), np.array([[2.0], [3.0]])
    found = outputs(lab, models.loaded(), town=town, size=size, rooms=rooms)
    assert np.allclose(found["predict_proba"], model.predict_proba(given))
    with pytest.raises(InvalidArgument, match="Found unknown categories"):
        outputs(lab, models.loaded(), town=np.array([[b"x"]], object), size=size[:1], rooms=rooms[:1])


@pytest.mark.parametrize("with_pandas", [True, False])
def test_columns_of_numbers_are_completed_by_name(
    lab: Lab, models: SklearnModels, monkeypatch: pytest.MonkeyPatch, with_pandas: bool
) -> None:
    if not with_pandas:
        monkeypatch.setitem(library._found, "pandas", ImportError("none"))
    names = ["a", "b", "c", "d"]
    model = LinearRegression().fit(pandas.DataFrame(TRAINED, columns=names), TRAINED[:, 0] - TRAINED[:, 3])
    skops.dump(model, models.version / "model.skops")
    backend = models.loaded(inputs="columns")
    given = {name: rows(5)[:, [number]] for number, name in enumerate(names)}
    found = outputs(lab, backend, **dict(reversed(given.items())))
    assert np.allclose(found["predict"].reshape(-1), rows(5)[:, 0] - rows(5)[:, 3])


def test_a_row_has_the_same_result_alone_and_in_a_batch(lab: Lab, models: SklearnModels) -> None:
    model = RandomForestRegressor(5, random_state=0).fit(TRAINED, TRAINED[:, 0])
    skops.dump(model, models.version / "model.skops")
    backend = models.loaded()
    parts = [rows(1), rows(0), rows(17, 3)]
    requests = [lab.request({"input": part}) for part in parts]
    backend.execute(requests, lab.timings)
    for part, request in zip(parts, requests, strict=True):
        expected = model.predict(part) if len(part) else np.zeros(0)
        assert np.array_equal(lab.outputs(request)["predict"], expected.reshape(-1, 1))


def test_a_wrong_row_fails_its_own_request_with_the_text_of_scikit_learn(lab: Lab, models: SklearnModels) -> None:
    skops.dump(classifier(), models.version / "model.skops")
    backend = models.loaded({"input": [{"name": "input", "data_type": "TYPE_FP64", "dims": [-1]}]})
    wrong = rows(1)
    wrong[0, 0] = np.nan
    requests = [lab.request({"input": rows(1)}), lab.request({"input": wrong})]
    backend.execute(requests, lab.timings)
    assert lab.outputs(requests[0])["predict"].shape == (1, 1)
    error = lab.error(requests[1])
    assert isinstance(error, InvalidArgument)
    assert error.message.startswith("predict: Input X contains NaN")
    with pytest.raises(InvalidArgument, match="X has 3 features, but StandardScaler is expecting 4"):
        backend.execute([lab.request({"input": rows(2)[:, :3]})], lab.timings)


def test_a_file_of_another_version_is_loaded_with_a_warning(
    lab: Lab, models: SklearnModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sklearn.base.__version__", "1.2.0")
    joblib.dump(LinearRegression().fit(TRAINED, TRAINED[:, 0]), models.version / "model.joblib")
    monkeypatch.undo()
    models.loaded(settings=ALLOWED)
    assert any("model 'm': Trying to unpickle estimator LinearRegression from version 1.2.0" in text
               for level, text in lab.logged if level == "WARNING")  # fmt: skip


# ---- files that run code ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.joblib", "model.pkl", "model.pickle"])
@pytest.mark.parametrize("allowed", ["", "false", "other", "n,o", "M"])
def test_nothing_of_a_pickle_is_executed_unless_it_is_allowed_for_the_model(
    lab: Lab, models: SklearnModels, tmp_path: Path, name: str, allowed: str
) -> None:
    mark = tmp_path / "executed"
    joblib.dump(MakesAFolder(mark), models.version / name)
    config = {"parameters": {"allow-pickle": {"string_value": "true"}}}
    for method in ("complete", "verify", "load"):
        with pytest.raises(Unsupported, match="is a pickle .*--allow-pickle=m "):
            getattr(SklearnBackend(lab), method)(models.arguments(config, {"allow-pickle": allowed}))
    assert not mark.exists()
    with pytest.raises(InvalidArgument, match="has none of the methods predict"):
        models.loaded(settings={"allow-pickle": "x, m"})
    assert mark.exists(), "the pickle is one that runs code"


def test_a_pickle_that_is_called_skops_is_no_skops_file(models: SklearnModels, tmp_path: Path) -> None:
    joblib.dump(MakesAFolder(tmp_path / "executed"), models.version / "model.skops")
    with pytest.raises(InternalError, match=r"'model.skops' cannot be read: BadZipFile"):
        models.loaded(settings=ALLOWED)
    assert not (tmp_path / "executed").exists()


def test_types_that_the_server_does_not_trust_are_refused_by_name(models: SklearnModels) -> None:
    from sklearn.preprocessing import FunctionTransformer

    model = make_pipeline(FunctionTransformer(words), LogisticRegression())
    skops.dump(model, models.version / "model.skops")
    name = f"{words.__module__}.words"
    with pytest.raises(Unsupported, match=f"does not trust: {name}.*--backend-config=sklearn,trusted-types={name}"):
        models.loaded()


def test_an_archive_that_memory_cannot_hold_is_not_unpacked(models: SklearnModels) -> None:
    skops.dump(classifier(), models.version / "model.skops")
    with zipfile.ZipFile(models.version / "model.skops", "a") as file:
        file.writestr("zeros.npy", bytes(10), zipfile.ZIP_DEFLATED)
        file.getinfo("zeros.npy").file_size = 1 << 50  # as of a real one, of which each petabyte takes a terabyte
    with pytest.raises(InvalidArgument, match=r"'model.skops' has 11\d{14} bytes when it is unpacked"):
        models.loaded()


def test_a_file_is_opened_once_for_its_completion_and_its_load(
    lab: Lab, models: SklearnModels, tmp_path: Path
) -> None:
    model = classifier()
    model.opened = MakesAFolder(tmp_path / "opened")
    joblib.dump(model, models.version / "model.joblib")
    backend = SklearnBackend(lab)
    completed = backend.complete(models.arguments(settings=ALLOWED))
    backend.load(models.arguments(completed, ALLOWED))  # another time, the folder would be there already
    assert np.array_equal(outputs(lab, backend, input=rows(9))["predict_proba"], model.predict_proba(rows(9)))


def test_a_file_that_has_changed_since_its_completion_is_opened_again(lab: Lab, models: SklearnModels) -> None:
    skops.dump(classifier(), models.version / "model.skops")
    backend = SklearnBackend(lab)
    completed = backend.complete(models.arguments())
    (models.version / "model.skops").write_bytes(b"PK")
    with pytest.raises(InternalError, match="cannot be read"):
        backend.load(models.arguments(completed))


def test_no_part_of_an_estimator_starts_threads_or_processes() -> None:
    forest = RandomForestClassifier(2, n_jobs=-1)
    searched = GridSearchCV(make_pipeline(StandardScaler(), forest), {"randomforestclassifier__max_depth": [2]}, cv=2)
    vote = VotingClassifier([("search", searched), ("linear", LogisticRegression())], n_jobs=2)
    vote.fit(TRAINED, words(TRAINED))
    use_one_thread(vote)
    [fitted, _] = vote.estimators_
    parts = [vote, forest, fitted.best_estimator_[-1], fitted.estimator[-1]]
    assert [each.n_jobs for each in parts] == [1, 1, 1, 1]


def test_a_damaged_file_is_an_error_of_its_load(models: SklearnModels) -> None:
    skops.dump(classifier(), models.version / "model.skops")
    data = (models.version / "model.skops").read_bytes()
    (models.version / "model.skops").write_bytes(data[: len(data) // 2])
    with pytest.raises(InternalError, match="cannot be read"):
        models.loaded()
    with zipfile.ZipFile(models.version / "model.skops", "w") as file:
        file.writestr("schema.json", "{}")
    with pytest.raises(InternalError, match="cannot be read"):
        models.loaded()


@pytest.mark.parametrize(
    ("config", "parameters", "text"),
    [
        ({"output": [{"name": "transform", "data_type": "TYPE_FP64", "dims": [1]}]}, {}, "is no method of Pipeline"),
        ({}, {"inputs": "rows"}, "is 'rows'; expected columns or tensor"),
        ({}, {"inputs": "columns"}, "it was fitted with an array, whose columns have no names"),
        ({"input": [{"name": "x", "data_type": "TYPE_FP64", "dims": [3]}]}, {}, "because the model has 4 features"),
        ({"default_model_filename": "a.skops"}, {}, "a.skops' for model 'm'"),
    ],
)
def test_a_configuration_that_does_not_fit_the_model_is_refused(
    models: SklearnModels, config: dict[str, Any], parameters: dict[str, str], text: str
) -> None:
    skops.dump(classifier(), models.version / "model.skops")
    with pytest.raises(ServingError) as failure:
        models.loaded(config, None, **parameters)
    assert text in failure.value.message


def test_forks_of_a_rehearsed_zygote_compute_with_threads() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.backends.sklearn.forks_after_rehearsal"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_without_the_library_the_error_says_how_it_is_installed(
    models: SklearnModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    skops.dump(classifier(), models.version / "model.skops")
    monkeypatch.setitem(library._found, "skops.io", ImportError("No module named 'skops'"))
    with pytest.raises(Unavailable, match=r"needs 'skops'.*pip install '.\[sklearn\]'"):
        models.loaded()

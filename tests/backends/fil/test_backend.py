"""Models of XGBoost, LightGBM and Treelite give what the libraries give, in Triton's outputs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel.errors import InternalError, InvalidArgument, ServingError, Unavailable, Unsupported
from tests.backends.fil.conftest import FEATURES, FilModels, fitted, rows

if TYPE_CHECKING:
    from backends.fil.backend import FilBackend
    from shm.arrays import Array
    from tests.backends.conftest import Lab

treelite: Any = pytest.importorskip("treelite", reason="needs the extra fil")
xgboost: Any = pytest.importorskip("xgboost", reason="needs xgboost-cpu")
lightgbm: Any = pytest.importorskip("lightgbm", reason="needs lightgbm")

#: Scores of Treelite and of the library agree to this, and so do ours.
TOLERANCE = 1e-5

LEGACY = Path(__file__).with_name("legacy_xgboost.model")


def outputs(lab: Lab, backend: FilBackend, given: Array, name: str = "output__0", wanted: str = "") -> Array:
    """Return an output of one request."""
    request = lab.request({"input__0": given}, outputs=[wanted] if wanted else [])
    backend.execute([request], lab.timings)
    assert set(lab.datatypes(request).values()) == {"FP32"}
    return lab.outputs(request)[name]


def save(models: FilModels, kind: str, classes: int) -> Any:
    """Write a model file, and return the library's model."""
    if kind == "lightgbm":
        model = fitted(lightgbm.LGBMClassifier if classes else lightgbm.LGBMRegressor, classes, verbose=-1)
        model.booster_.save_model(models.version / "model.txt")
        return model
    model = fitted(xgboost.XGBClassifier if classes else xgboost.XGBRegressor, classes, max_depth=3)
    if kind == "checkpoint":
        model.save_model(models.version.parent / "whole.json")
        treelite.frontend.load_xgboost_model(models.version.parent / "whole.json").serialize(
            models.version / "checkpoint.tl"
        )
    else:
        model.save_model(models.version / f"xgboost.{kind}")
    return model


KINDS = ("json", "ubj", "lightgbm", "checkpoint")
CONFIG_2 = {"output": [{"name": "output__0", "data_type": "TYPE_FP32", "dims": [2]}]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["", "treelite"])
def test_a_regression_gives_the_values_of_its_library(lab: Lab, models: FilModels, kind: str, engine: str) -> None:
    model = save(models, kind, 0)
    backend = models.loaded(engine=engine)
    found = outputs(lab, backend, rows(40))
    assert found.shape == (40,)
    assert np.allclose(found, model.predict(rows(40)), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_gives_classes_and_probabilities(lab: Lab, models: FilModels, kind: str, classes: int) -> None:
    model = save(models, kind, classes)
    assert np.array_equal(outputs(lab, models.loaded(), rows(40)), model.predict(rows(40)))
    found = outputs(lab, models.loaded(predict_proba="true"), rows(40))
    assert found.shape == (40, classes)
    assert np.allclose(found, model.predict_proba(rows(40)), rtol=TOLERANCE, atol=TOLERANCE)


def test_probabilities_of_two_classes_are_one_number_or_two(lab: Lab, models: FilModels) -> None:
    model = save(models, "json", 2)
    one = {"output": [{"name": "output__0", "data_type": "TYPE_FP32", "dims": [1]}]}
    found = outputs(lab, models.loaded(one, predict_proba="true"), rows(4))
    assert found.shape == (4,)
    assert np.allclose(found, model.predict_proba(rows(4))[:, 1], atol=TOLERANCE)
    with pytest.raises(InvalidArgument, match=r"has dims \[3\]; expected \[1\] or \[2\], because it has a number for"):
        models.loaded({"output": [{"name": "output__0", "data_type": "TYPE_FP32", "dims": [3]}]}, predict_proba="true")


def test_the_threshold_decides_between_two_classes(lab: Lab, models: FilModels) -> None:
    model = save(models, "ubj", 2)
    scores = model.predict_proba(rows(200))[:, 1]
    threshold = float(np.unique(scores)[-2:].mean())  # only the rows with the highest score are above it
    found = outputs(lab, models.loaded(threshold=str(threshold)), rows(200))
    assert np.array_equal(found, (scores > threshold).astype(np.float32))
    assert 0 < found.sum() < outputs(lab, models.loaded(), rows(200)).sum()


def test_a_classifier_as_a_regression_gives_its_scores(lab: Lab, models: FilModels) -> None:
    model = save(models, "json", 3)
    found = outputs(lab, models.loaded(output_class="false"), rows(7))
    assert np.allclose(found, model.predict_proba(rows(7)), atol=TOLERANCE)
    assert (
        "WARNING",
        "The `output_class` parameter has been removed in 25.09 release. Use `is_classifier` instead.",
    ) in (lab.logged)


def test_a_row_has_the_same_result_alone_and_in_a_batch(lab: Lab, models: FilModels) -> None:
    save(models, "json", 3)
    backend = models.loaded(predict_proba="true")
    parts = [rows(1), rows(5, 2), rows(70, 3), rows(0)]
    requests = [lab.request({"input__0": part}) for part in parts]
    backend.execute(requests, lab.timings)
    for part, request in zip(parts, requests, strict=True):
        assert np.array_equal(lab.outputs(request)["output__0"], outputs(lab, backend, part))


def test_fp64_of_a_step_before_is_converted(lab: Lab, models: FilModels) -> None:
    model = save(models, "ubj", 0)
    config = {"input": [{"name": "input__0", "data_type": "TYPE_FP64", "dims": [FEATURES]}]}
    found = outputs(lab, models.loaded(config), rows(9).astype(np.float64))
    assert np.allclose(found, model.predict(rows(9)), atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["json", "lightgbm", "checkpoint"])
def test_missing_values_take_the_ways_of_the_library(lab: Lab, models: FilModels, kind: str) -> None:
    model = save(models, kind, 0)
    given = rows(20)
    given[::2, 0] = np.nan
    assert np.allclose(outputs(lab, models.loaded(), given), model.predict(given), atol=TOLERANCE)


@pytest.mark.parametrize("engine", ["treelite", "xgboost"])
@pytest.mark.parametrize("width", [1, FEATURES - 1, FEATURES + 1])
def test_rows_of_another_width_are_refused_also_if_the_configuration_allows_any(
    lab: Lab, models: FilModels, engine: str, width: int
) -> None:
    save(models, "json", 0)
    backend = models.loaded({"input": [{"name": "input__0", "data_type": "TYPE_FP32", "dims": [-1]}]}, engine=engine)
    with pytest.raises(InvalidArgument, match=f"has shape .2, {width}.; expected {FEATURES} features"):
        backend.execute([lab.request({"input__0": np.zeros((2, width), np.float32)})], lab.timings)


def test_a_model_without_batches_takes_rows_in_its_first_dimension(lab: Lab, models: FilModels) -> None:
    model = save(models, "json", 0)
    config = {
        "max_batch_size": 0,
        "input": [{"name": "rows", "data_type": "TYPE_FP32", "dims": [-1, FEATURES]}],
        "output": [{"name": "output__0", "data_type": "TYPE_FP32", "dims": [-1, 1]}],
    }
    backend = models.loaded(config)
    request = lab.request({"rows": rows(6)})
    backend.execute([request], lab.timings)
    assert np.allclose(lab.outputs(request)["output__0"], model.predict(rows(6)), atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["json", "lightgbm"])
@pytest.mark.parametrize("classes", [0, 3])
def test_shap_values_are_those_of_the_library(lab: Lab, models: FilModels, kind: str, classes: int) -> None:
    model = save(models, kind, classes)
    count = max(classes, 1)
    config = {
        "output": [
            {"name": "output__0", "data_type": "TYPE_FP32", "dims": [1]},
            {"name": "treeshap_output", "data_type": "TYPE_FP32", "dims": [count, FEATURES + 1]},
        ]
    }
    found = outputs(lab, models.loaded(config), rows(3), "treeshap_output")
    if kind == "json":
        expected = model.get_booster().predict(xgboost.DMatrix(rows(3)), pred_contribs=True)
    else:
        expected = model.booster_.predict(rows(3), pred_contrib=True)
    assert found.shape == ((3, FEATURES + 1) if count == 1 else (3, count, FEATURES + 1))
    assert np.allclose(found.reshape(3, -1), np.asarray(expected).reshape(3, -1), atol=TOLERANCE)


def test_shap_values_of_a_checkpoint_are_refused_with_the_reason(models: FilModels) -> None:
    save(models, "checkpoint", 0)
    shap = {"name": "treeshap_output", "data_type": "TYPE_FP32", "dims": [FEATURES + 1]}
    with pytest.raises(InvalidArgument, match="SHAP values are computed by XGBoost and LightGBM from their own files"):
        models.loaded({"output": [shap]})


def test_a_binary_file_of_an_old_xgboost_is_read(lab: Lab, models: FilModels) -> None:
    """XGBoost 2.1.4 has made it and computed these; no later version writes the format."""
    shutil.copy(LEGACY, models.version / "xgboost.model")
    backend = models.loaded(predict_proba="true", is_classifier="true")
    given = np.array([[0.9, 0.9, 0.1, 0.2], [0.1, 0.1, 0.5, 0.5], [0.6, 0.3, 0.0, 1.0]], np.float32)
    expected = [0.7973463535308838, 0.19634585082530975, 0.31127068400382996]
    assert np.allclose(outputs(lab, backend, given)[:, 1], expected, atol=TOLERANCE)


def test_forests_of_scikit_learn_come_as_checkpoints(lab: Lab, models: FilModels) -> None:
    ensemble: Any = pytest.importorskip("sklearn.ensemble")
    model = fitted(ensemble.RandomForestClassifier, 2, random_state=0)
    treelite.sklearn.import_model(model).serialize(models.version / "checkpoint.tl")
    found = outputs(lab, models.loaded(predict_proba="true"), rows(30))
    assert np.allclose(found, model.predict_proba(rows(30)), atol=TOLERANCE)
    assert np.array_equal(outputs(lab, models.loaded(), rows(30)), model.predict(rows(30)))
    isolation = fitted(ensemble.IsolationForest, 0, random_state=0)
    treelite.sklearn.import_model(isolation).serialize(models.version / "checkpoint.tl")
    found = outputs(lab, models.loaded(), rows(30))
    assert np.allclose(found, -isolation.score_samples(rows(30)), atol=TOLERANCE)


def test_the_log_says_what_computes_and_why(lab: Lab, models: FilModels) -> None:
    save(models, "json", 0)
    models.loaded()
    models.loaded(engine="xgboost")
    lines = [text for level, text in lab.logged if level == "INFO"]
    assert "1 row: " in lines[0]
    assert "µs with xgboost, 32 rows: " in lines[0]
    assert lines[1] == "m_0 computes with xgboost (as configured)"


def test_a_library_that_differs_from_treelite_is_not_used(
    lab: Lab, models: FilModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends.fil.engines import XgboostEngine

    save(models, "json", 0)
    right = XgboostEngine.scores
    monkeypatch.setattr(XgboostEngine, "scores", lambda self, given: right(self, given) + 1e-3)
    models.loaded()
    assert lab.logged[-1][1] == "m_0 computes with treelite (the scores of xgboost differ by more than 1e-05)"


def test_without_the_library_treelite_computes_and_without_treelite_nothing_does(
    lab: Lab, models: FilModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends.fil import library

    save(models, "json", 0)
    found = library._libraries
    monkeypatch.setitem(found, "xgboost", ImportError("none"))
    models.loaded()
    assert lab.logged[-1][1] == "m_0 computes with treelite (xgboost is not installed)"
    with pytest.raises(Unavailable, match="pip install xgboost-cpu"):
        models.loaded(engine="xgboost")
    monkeypatch.setitem(found, "treelite", ImportError("No module named 'treelite'"))
    with pytest.raises(
        Unavailable, match=r"needs Treelite, which cannot be imported: No module.*pip install '.\[fil\]'"
    ):
        models.loaded()


@pytest.mark.parametrize(
    ("name", "content", "parameters", "error", "text"),
    [
        ("xgboost.json", b'{"learner": 3}', {}, InternalError, "failed to load model 'm': Provided JSON could not be"),
        ("xgboost.ubj", b"{L\0\0\0", {}, InternalError, "failed to load model 'm': "),
        ("model.txt", b"tree\nversion=v4\n", {}, InternalError, "Ill-formed LightGBM model file"),
        ("checkpoint.tl", b"\4\0\0\0\1\0\0\0\0\0\0\0\3\3", {}, InvalidArgument, "the checkpoint ends too early"),
        ("xgboost.model", b"tree\n" * 40, {"model_type": "xgboost"}, InternalError, "looks like 'lightgbm', and was"),
        ("model.bst", b"what is this", {}, InvalidArgument, "is no file of XGBoost"),
        ("other.json", b"{}", {}, Unavailable, "expected one of xgboost.json, xgboost.ubj"),
        ("other.json", b"{}", {"model_type": "lightgbm"}, Unavailable, "model.txt' for model 'm'"),
        ("xgboost.json", b"{}", {"model_type": "catboost"}, Unsupported, "it is one of xgboost, xgboost_json"),
        ("xgboost.json", b"{}", {"is_classifier": "yes"}, InternalError, "is 'yes'; expected true or false"),
        ("xgboost.json", b"{}", {"threshold": "half"}, InvalidArgument, "is 'half'; expected a finite number"),
        ("xgboost.json", b"{}", {"engine": "gpu"}, InvalidArgument, "it is one of treelite, xgboost, lightgbm"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_model_is_said(
    models: FilModels, name: str, content: bytes, parameters: dict[str, str], error: type[ServingError], text: str
) -> None:
    (models.version / name).write_bytes(content)
    with pytest.raises(error) as failure:
        models.loaded(None, **parameters)
    assert text in failure.value.message
    assert "/project/src" not in failure.value.message


def test_several_targets_are_refused(models: FilModels) -> None:
    given = rows(100, seed=0)
    model = xgboost.XGBRegressor(n_estimators=3).fit(given, given[:, :2])
    model.save_model(models.version / "xgboost.json")
    with pytest.raises(Unsupported, match="Multi-target model not supported"):
        models.loaded()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"input": [{"name": "x", "data_type": "TYPE_INT64", "dims": [FEATURES]}]}, "is INT64; expected FP32 or FP64"),
        ({"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]}, "because the model has 5 features"),
        ({"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]}, "output 'y' of model 'm' is unknown"),
        ({"output": [{"name": "output__0", "data_type": "TYPE_FP64", "dims": [1]}]}, "is FP64; expected FP32"),
        ({"output": [{"name": "output__0", "data_type": "TYPE_FP32", "dims": [2]}]}, "expected [1], because it"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_the_model_is_refused(
    models: FilModels, config: dict[str, Any], text: str
) -> None:
    save(models, "json", 0)
    with pytest.raises(ServingError) as failure:
        models.loaded(config)
    assert text in failure.value.message


def test_the_configuration_is_completed_from_the_file(lab: Lab, models: FilModels) -> None:
    from backends.fil.backend import FilBackend

    save(models, "ubj", 3)
    completed = FilBackend(lab).complete(models.arguments(predict_proba="true"))
    assert completed["max_batch_size"] == 4096
    assert completed["dynamic_batching"] == {}
    assert completed["input"] == [{"name": "input__0", "data_type": "TYPE_FP32", "dims": [FEATURES]}]
    assert completed["output"] == [{"name": "output__0", "data_type": "TYPE_FP32", "dims": [3]}]


def test_a_model_that_returns_only_its_class_has_classes_and_probabilities(lab: Lab, models: FilModels) -> None:
    given = rows(300, seed=0)
    data = xgboost.DMatrix(given, (given[:, 0] * 3).astype(int))
    booster = xgboost.train({"objective": "multi:softmax", "num_class": 3}, data, 5)
    booster.save_model(models.version / "xgboost.json")
    expected = booster.predict(xgboost.DMatrix(rows(40)))
    assert np.array_equal(outputs(lab, models.loaded(), rows(40)), expected)
    found = outputs(lab, models.loaded(predict_proba="true"), rows(40))
    assert np.array_equal(found.argmax(axis=1), expected)
    assert np.allclose(found.sum(axis=1), 1)

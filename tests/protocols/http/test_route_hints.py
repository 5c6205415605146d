"""Hints for paths that no route has."""

from __future__ import annotations

import pytest

from protocols.http.route_hints import ROUTE_HINTS, method_hint, route_hint
from protocols.http.routes import find_endpoint

MODELS = ["iris", "digits"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/predict", ". Did you mean POST /v2/models/NAME/infer? The models are: digits, iris."),
        ("/v1/models/iris:predict", ". Did you mean POST /v2/models/iris/infer?"),
        ("/v1/models/iris/versions/2:predict", ". Did you mean POST /v2/models/iris/infer?"),
        ("/v2/models/iris/predict", ". Did you mean POST /v2/models/iris/infer?"),
        ("/predictions/irs", ". Did you mean POST /v2/models/irs/infer? The models are: digits, iris."),
        ("/v2/models", ". Did you mean POST /v2/repository/index, which lists the models?"),
        ("/v1/models/", ". Did you mean POST /v2/repository/index, which lists the models?"),
        ("/v1/models/iris", ". Did you mean GET /v2/models/iris?"),
        ("/healthz", ". Did you mean GET /v2/health/ready?"),
        ("/v2/models/iris/inferr", ". Did you mean POST /v2/models/iris/infer?"),
        ("/v2/models/iris/Infer/", ". Did you mean POST /v2/models/iris/infer?"),
        ("/v2/model/iris/infer", ". Did you mean POST /v2/models/iris/infer?"),
        ("/v2/models/iris/version/3/infer", ". Did you mean POST /v2/models/iris/versions/3/infer?"),
        ("/v2/health/redy", ". Did you mean GET /v2/health/ready?"),
        ("/v2/repository/indx", ". Did you mean POST /v2/repository/index?"),
        ("/", ". Did you mean GET /v2?"),
        ("/v2/nowhere", ""),
        ("/v2/models/iris/explode", ""),
        ("/v3", ""),
        ("/favicon.ico", ""),
    ],
)
def test_the_nearest_route_is_named(path: str, hint: str) -> None:
    assert path == "/" or find_endpoint(path) is None  # the page is not for every client
    assert route_hint(path, lambda: MODELS) == hint


def test_the_only_model_stands_in_the_hint() -> None:
    assert (
        route_hint("/predict", lambda: ["iris"]) == ". Did you mean POST /v2/models/iris/infer? The models are: iris."
    )


def test_no_model_is_named_to_a_client_that_may_not_list_them() -> None:
    assert route_hint("/predict", list) == ". Did you mean POST /v2/models/NAME/infer?"


def test_a_hint_names_few_models() -> None:
    hint = route_hint("/predict", lambda: {f"m{number:03}" for number in range(200)})
    assert hint.endswith("m008, m009 and 190 more.")


def test_long_paths_get_no_hint_and_control_characters_are_written_out() -> None:
    assert route_hint("/v2/models/" + "x" * 8000 + "/inferr", lambda: MODELS) == ""
    assert "\x1b" not in route_hint("/v2/models/a\x1b[0m/inferr", lambda: MODELS)


def test_every_route_of_the_table_exists() -> None:
    for route in ROUTE_HINTS:
        method, _, path = route.partition(" ")
        found = find_endpoint(path.replace("{model}", "m").replace("{version}", "1"))
        assert found is not None, route
        assert method in found[0].handlers, route


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v2/models/iris", ". Did you mean POST /v2/models/iris/infer?"),
        ("POST", "/v2/models/iris/versions/3", ". Did you mean POST /v2/models/iris/versions/3/infer?"),
        ("PUT", "/v2/models/iris", ". Did you mean GET /v2/models/iris?"),
        ("OPTIONS", "/v2/models/iris", ""),
        ("POST", "/v2/health/ready", ". Did you mean GET /v2/health/ready?"),
        ("GET", "/v2/models/iris/infer", ". Did you mean POST /v2/models/iris/infer?"),
        ("GET", "/v2/repository/index", ". Did you mean POST /v2/repository/index?"),
        ("POST", "/v2/models/" + "x" * 300, ""),
    ],
)
def test_a_wrong_method_names_what_was_meant(method: str, path: str, hint: str) -> None:
    found = find_endpoint(path)
    assert found is not None
    assert method not in found[0].handlers
    assert method_hint(path, method, found[0].handlers) == hint

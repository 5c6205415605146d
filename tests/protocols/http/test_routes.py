from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.http.endpoints import generate, infer, models, repository, settings, shared_memory
from protocols.http.routes import Handler, find_endpoint, request_path


@pytest.mark.parametrize(
    ("method", "path", "handler", "names"),
    [
        ("GET", "/v2", models.server_metadata, {}),
        ("GET", "/v2/health/live", models.live, {}),
        ("GET", "/v2/models/stats", models.statistics, {}),
        ("GET", "/v2/models/a", models.metadata, {"model": "a", "version": ""}),
        ("GET", "/v2/models/a%2fb/versions/3", models.metadata, {"model": "a%2fb", "version": "3"}),
        ("GET", "/v2/models/stats/stats", models.statistics, {"model": "stats"}),
        ("GET", "/v2/models/versions/config", models.config, {"model": "versions"}),
        ("POST", "/v2/models/a/versions/1/infer", infer.infer, {"model": "a", "version": "1"}),
        ("POST", "/v2/models/a/generate_stream", generate.generate_stream, {"model": "a"}),
        ("POST", "/v2/models/a/trace/setting", settings.update_trace, {"model": "a"}),
        ("GET", "/v2/trace/setting", settings.get_trace, {}),
        ("POST", "/v2/repository/index", repository.index, {"repository": ""}),
        ("POST", "/v2/repository/r/models/a/load", repository.load, {"repository": "r", "model": "a"}),
        ("POST", "/v2/repository/models/a/unload", repository.unload, {"repository": "", "model": "a"}),
        ("GET", "/v2/systemsharedmemory/status", shared_memory.system_status, {"region": ""}),
        ("POST", "/v2/cudasharedmemory/region/r/register", shared_memory.cuda_register, {"region": "r"}),
        ("POST", "/v2/systemsharedmemory/unregister", shared_memory.system_unregister, {"region": ""}),
    ],
)
def test_paths_lead_to_their_handlers(method: str, path: str, handler: Handler, names: dict[str, str]) -> None:
    found = find_endpoint(path)
    assert found is not None
    assert found[0].handlers[method] is handler
    assert found[1].items() >= names.items()


@pytest.mark.parametrize(
    "path",
    [
        "", "/v2/", "/v3", "//v2", "/v2#x", "/v2/health", "/v2/health/", "/v2/models", "/v2/models/",
        "/v2/models/a/", "/v2/models/a/explode", "/v2/models/a/versions/x", "/v2/models/a/versions/1/",
        "/v2/models/a/versions/1/trace/setting", "/v2/models/a/versions/\u0662", "/v2/models/a/b/infer",
        "/v2/repository/models/a", "/v2/systemsharedmemory", "/v2/systemsharedmemory/region/a",
    ],
)  # fmt: skip
def test_other_paths_lead_nowhere(path: str) -> None:
    assert find_endpoint(path) is None


@given(st.text(alphabet="/v2modelsrpityhrgnfc.%0 "))
def test_no_name_contains_a_slash(rest: str) -> None:
    found = find_endpoint("/v2/" + rest)
    if found is not None:
        names = {name: text for name, text in found[1].items() if name != "endpoint"}
        assert not any("/" in text for text in names.values())


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v2?x=/v3", "/v2"),
        ("http://host:8000/v2?x=1", "/v2"),
        ("http://host", ""),
        ("*", "*"),
        ("/v2/models/http://x", "/v2/models/http://x"),
    ],
)
def test_the_path_is_taken_from_the_target(target: str, path: str) -> None:
    assert request_path(target) == path

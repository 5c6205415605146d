"""CORS: which pages may read responses in a browser, and the responses to preflight requests."""

from __future__ import annotations

import pytest

from kernel.options import BadOption
from protocols.http.cors import CorsPolicy

EXPOSED = {"Access-Control-Expose-Headers": "Inference-Header-Content-Length"}


@pytest.mark.parametrize("origin", [None, "https://a.example", "null"])
def test_a_star_lets_everybody_read(origin: str | None) -> None:
    assert CorsPolicy(["*"]).response_headers(origin) == {"Access-Control-Allow-Origin": "*", **EXPOSED}


def test_listed_origins_may_read_and_caches_know_the_difference() -> None:
    policy = CorsPolicy(["https://a.example", "http://localhost:3000"])
    for origin in ("https://a.example", "http://localhost:3000"):
        assert policy.response_headers(origin) == {"Vary": "Origin", "Access-Control-Allow-Origin": origin, **EXPOSED}
    for other in (None, "https://b.example", "http://a.example", "https://a.example:8443", "null", "*"):
        assert policy.response_headers(other) == {"Vary": "Origin"}


def test_a_preflight_allows_the_methods_of_the_path_and_the_requested_headers() -> None:
    headers = CorsPolicy(["https://a.example"]).preflight_headers(
        "https://a.example", ["POST", "GET"], "content-type, inference-header-content-length"
    )
    assert headers == {
        "Vary": "Origin, Access-Control-Request-Headers",
        "Access-Control-Allow-Origin": "https://a.example",
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": "content-type, inference-header-content-length",
        "Access-Control-Max-Age": "600",
    }


def test_a_preflight_of_another_origin_gets_nothing() -> None:
    assert CorsPolicy(["https://a.example"]).preflight_headers("https://b.example", ["GET"], "x") == {"Vary": "Origin"}


@pytest.mark.parametrize("requested", [None, "", "a b", "a,", "x\udcff", "é"])
def test_what_is_no_list_of_names_is_not_repeated(requested: str | None) -> None:
    headers = CorsPolicy(["*"]).preflight_headers("https://a.example", ["GET"], requested)
    assert "Access-Control-Allow-Headers" not in headers


@pytest.mark.parametrize(
    "origin",
    ["", "example.com", "https://a.example/", "https://a/b", "https://a, https://b", "**", "https://", "file:///a"],
)
def test_what_no_browser_sends_is_refused_at_start(origin: str) -> None:
    with pytest.raises(BadOption, match="is not an origin"):
        CorsPolicy([origin])


@pytest.mark.parametrize("origin", ["null", "file://", "chrome-extension://abc", "*"])
def test_origins_without_a_site_can_be_allowed(origin: str) -> None:
    policy = CorsPolicy([origin])
    assert policy.allows(origin)
    assert policy.allows("https://a.example") is (origin == "*")

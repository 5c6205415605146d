"""What the operator's options do with a request by its head alone."""

from __future__ import annotations

import pytest

from kernel.errors import BadOption
from kernel.options import HttpOptions
from protocols.access import Category
from protocols.forwarding import ForwardedHeaders
from protocols.http.request_rules import RequestRules, make_request_rules


def test_without_options_nothing_is_refused_forwarded_or_added() -> None:
    for rules in (RequestRules(), make_request_rules(HttpOptions())):
        assert rules.refusal("POST", Category.INFERENCE, lambda name: None) is None
        assert rules.forwarded([(b"X-User", b"ann")]) is None
        assert rules.response_headers("https://a.example") == {}


@pytest.mark.parametrize(("value", "admitted"), [("secret", True), (b"secret", True), ("Secret", False), (None, False)])
def test_a_restricted_category_asks_for_its_header(value: str | bytes | None, admitted: bool) -> None:
    rules = make_request_rules(HttpOptions(restricted_api=("inference:X-Key=secret",)))
    refusal = None if admitted else "This API is restricted, expecting header 'X-Key'"
    assert rules.refusal("POST", Category.INFERENCE, {"X-Key": value}.get) == refusal
    assert rules.refusal("GET", Category.HEALTH, lambda name: None) is None


def test_forwarded_headers_keep_their_names_and_spaces_behind_their_values() -> None:
    rules = make_request_rules(HttpOptions(header_forward_pattern="^x-"))
    headers = [(b"x-User", b" ann \t"), (b"Other", b"1"), (b"X-Odd", b"caf\xe9")]
    assert rules.forwarded(headers) == ForwardedHeaders({"x-User": "ann \t", "X-Odd": "caf�"})
    assert rules.forwarded([(b"Other", b"1")]) is None


def test_cors_headers_depend_on_the_origin() -> None:
    rules = make_request_rules(HttpOptions(cors_origins=("https://a.example",)))
    assert rules.response_headers("https://a.example")["Access-Control-Allow-Origin"] == "https://a.example"
    assert rules.response_headers(None) == {"Vary": "Origin"}


@pytest.mark.parametrize(
    "options",
    [
        HttpOptions(restricted_api=("nothing:a=b",)),
        HttpOptions(header_forward_pattern="("),
        HttpOptions(cors_origins=("example.com",)),
    ],
)
def test_options_that_cannot_be_followed_are_refused(options: HttpOptions) -> None:
    with pytest.raises(BadOption):
        make_request_rules(options)

from __future__ import annotations

import math

import pytest

from kernel.errors import InvalidArgument
from kernel.traffic.settings import LabelTarget, MatchRule, TrafficSettings, changed, read_settings, read_toml

EXAMPLE = b"""
key = "header:X-User-Id"
[labels]
stable = 3
canary = 4
other = { model = "resnet_small", version = 7 }
[weights]
stable = 95
canary = 5
[[rules]]
header = "x-tenant"
is = ["acme", "initech"]
to = "canary"
[[rules]]
sequence = true
to = "3"
"""


def test_a_file_is_read() -> None:
    found = read_toml(EXAMPLE)
    assert found.labels == {"stable": 3, "canary": 4, "other": LabelTarget("resnet_small", 7)}
    assert list(found.weights.items()) == [("stable", 95), ("canary", 5)]
    assert found.rules == (
        MatchRule("canary", header="x-tenant", values=("acme", "initech")), MatchRule("3", sequence=True),
    )  # fmt: skip
    assert found.key == "header:X-User-Id"


def test_what_is_written_is_read_again() -> None:
    found = read_toml(EXAMPLE)
    assert read_settings(found.as_dict()) == found


def test_a_target_is_a_label_or_a_number() -> None:
    found = read_toml(EXAMPLE)
    assert found.target("canary") == ("", "4")
    assert found.target("3") == ("", "3")
    assert found.target("other") == ("resnet_small", "7")
    assert read_settings({"labels": {"a": {"model": "b"}}}).target("a") == ("b", "")


def test_members_are_replaced_one_by_one() -> None:
    found = changed(read_toml(EXAMPLE), {"weights": {"stable": 1, "canary": 1}})
    assert found.weights == {"stable": 1, "canary": 1}
    assert found.key == "header:X-User-Id"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("weights = { canary = 1 }", "'canary' in 'weights' names no target"),
        ("weights = { '4' = -1 }", ">= 0"),
        ("weights = { '4' = 0 }", "one of the weights must be greater than 0"),
        ("weights = { '4' = 1.5 }", "Expected `int`"),
        ("labels = { '4x' = 3 }", "'4x' cannot be a label"),
        ("labels = { x = '3' }", "label 'x' names no version: expected its number"),
        ("labels = { x = true }", "label 'x' names no version"),
        ("labels = { x = { version = 3 } }", "missing required field `model`"),
        ("key = 'cookie:a'", "'cookie:a' is no key: expected header:NAME"),
        ("key = 'header:'", "is no key"),
        ("[[rules]]\nto = '3'", "rule 1 needs one of 'header', 'parameter' and 'sequence = true'"),
        ("[[rules]]\nto = '3'\nheader = 'a'\nsequence = true", "rule 1 needs one of"),
        ("[[rules]]\nto = '3'\nsequence = true\nis = ['a']", "rule 1 cannot have 'is'"),
        ("[[rules]]\nto = 'x'\nheader = 'a'", "'x' in 'rules' names no target"),
        ("wieghts = {}", "unknown field `wieghts`"),
        ("weights = ", "it is not TOML"),
        ("a = " + "[" * 2000, "it is not TOML"),
    ],
)
def test_a_wrong_file_gets_an_error_that_says_what_was_expected(text: str, error: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        read_toml(text.encode())
    assert error in raised.value.message


def test_bytes_that_are_not_utf8_are_an_error() -> None:
    with pytest.raises(InvalidArgument, match="it is not TOML"):
        read_toml(b"\xff")


@pytest.mark.parametrize(
    "document",
    [
        {"salt": "\udcff"},
        {"outputs": {"\udcff": "exact"}},
        {"rules": [{"header": "x", "is": ["\udcff"], "to": "3"}]},
    ],
)
def test_a_text_that_no_file_can_have_is_an_error(document: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="a text of the traffic rule is no Unicode"):
        read_settings(document)


@pytest.mark.parametrize(
    "document",
    [
        {"shadow": {"to": "3", "percent": math.nan}},
        {"outputs": {"OUT": {"relative": math.nan}}},
        {"outputs": {"OUT": {"absolute": math.inf}}},
        {"feedback": {"minutes": math.nan}},
    ],
)
def test_numbers_that_are_none_are_errors(document: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="Expected `float`"):
        read_settings(document)


def test_a_change_of_nothing_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="expected one or more of labels, weights"):
        changed(TrafficSettings(), {})

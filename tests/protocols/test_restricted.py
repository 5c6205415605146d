"""Restricted APIs: what the flags may say, and who is let in."""

from __future__ import annotations

import pytest

from kernel.options import BadOption
from protocols.restricted import GRPC, HTTP, Category, RestrictedProtocol, parse_restrictions


def test_there_are_tritons_nine_categories() -> None:
    assert [category.value for category in Category] == [
        "health",
        "metadata",
        "inference",
        "shared-memory",
        "model-config",
        "model-repository",
        "statistics",
        "trace",
        "logging",
    ]


def test_without_flags_everything_is_open() -> None:
    restrictions = parse_restrictions((), HTTP)
    assert not restrictions
    assert [restrictions.of(category) for category in Category] == [None] * 9


def test_each_category_asks_for_the_header_of_its_flag() -> None:
    restrictions = parse_restrictions(("health,trace:one=1", "logging:Two=a=b:c"), HTTP)
    found = {category: restrictions.of(category) for category in Category}
    asked = {category: (each.header, each.value) for category, each in found.items() if each is not None}
    assert restrictions
    assert asked == {
        Category.HEALTH: ("one", b"1"),
        Category.TRACE: ("one", b"1"),
        Category.LOGGING: ("Two", b"a=b:c"),
    }


@pytest.mark.parametrize(
    ("door", "header", "message"),
    [
        (HTTP, "key", "This API is restricted, expecting header 'key'"),
        (GRPC, "triton-grpc-protocol-key", "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"),
    ],
)
def test_the_doors_name_their_headers_differently(door: RestrictedProtocol, header: str, message: str) -> None:
    restriction = parse_restrictions(("inference:key=value",), door).of(Category.INFERENCE)
    assert restriction is not None
    assert (restriction.header, restriction.message) == (header, message)


@pytest.mark.parametrize(
    ("given", "admitted"),
    [
        ("sécret", True),
        ("sécret".encode(), True),
        (None, False),
        ("", False),
        ("secret", False),
        ("sécret ", False),
        ("Sécret", False),
        (b"\xff\xfe", False),
        ("\udcff", False),
    ],
)
def test_only_the_very_value_is_admitted(given: str | bytes | None, admitted: bool) -> None:
    restriction = parse_restrictions(("health:key=sécret",), HTTP).of(Category.HEALTH)
    assert restriction is not None
    assert restriction.admits(given) is admitted


@pytest.mark.parametrize("text", ["", "health", "health:", "health:key", "health:key=", ":key=value", "health:=value"])
def test_a_malformed_value_is_refused(text: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_restrictions((text,), HTTP)
    assert str(caught.value) == (
        f"--http-restricted-api option format is '<config name>:<setting>=<value>'. Got {text}"
    )


@pytest.mark.parametrize(
    ("texts", "door", "message"),
    [
        (("model-reposit,health:k=v",), HTTP, "unknown restricted api 'model-reposit'"),
        (("health,:k=v",), HTTP, "unknown restricted api ''"),
        (("Health:k=v",), GRPC, "unknown restricted protocol 'Health'"),
        (
            ("health:k=v", "trace,health:k=v"),
            HTTP,
            "restricted api 'health' can not be specified in multiple config groups",
        ),
        (("trace,trace:k=v",), GRPC, "restricted protocol 'trace' can not be specified in multiple config groups"),
    ],
)
def test_categories_are_known_and_come_once(texts: tuple[str, ...], door: RestrictedProtocol, message: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_restrictions(texts, door)
    assert str(caught.value) == message

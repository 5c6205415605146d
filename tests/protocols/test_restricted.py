"""Restricted APIs: what the flags may say, and who is let in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.options import AdminOptions, BadOption
from protocols.keys import KeyReader
from protocols.restricted import GRPC, HTTP, Category, RestrictedProtocol, Restrictions, parse_restrictions

if TYPE_CHECKING:
    from pathlib import Path


def test_there_are_tritons_nine_categories_and_that_of_the_metrics() -> None:
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
        "metrics",
    ]


def test_without_flags_everything_is_open() -> None:
    restrictions = parse_restrictions((), HTTP, KeyReader())
    assert not restrictions
    assert [restrictions.of(category) for category in Category] == [None] * 10


def test_each_category_asks_for_the_header_of_its_flag() -> None:
    restrictions = parse_restrictions(("health,trace:one=1", "logging:Two=a=b:c"), HTTP, KeyReader())
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
    restriction = parse_restrictions(("inference:key=value",), door, KeyReader()).of(Category.INFERENCE)
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
    restriction = parse_restrictions(("health:key=sécret",), HTTP, KeyReader()).of(Category.HEALTH)
    assert restriction is not None
    assert restriction.admits(given) is admitted


@pytest.mark.parametrize("text", ["", "health", "health:", "health:key", "health:key=", ":key=value", "health:=value"])
def test_a_malformed_value_is_refused(text: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_restrictions((text,), HTTP, KeyReader())
    assert str(caught.value) == (
        f"--http-restricted-api option format is '<config name>:<setting>=<value>'. Got {text}"
    )


@pytest.mark.parametrize(
    ("texts", "door", "message"),
    [
        (("model-reposit,health:k=v",), HTTP, "unknown restricted api 'model-reposit'"),
        (("health,:k=v",), HTTP, "unknown restricted api ''"),
        (("Health:k=v",), GRPC, "unknown restricted protocol 'Health'"),
        (("metrics:k=v",), GRPC, "unknown restricted protocol 'metrics'"),
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
        parse_restrictions(texts, door, KeyReader())
    assert str(caught.value) == message


# ---- --admin-access --------------------------------------------------------------------------


def asked(
    restrictions: Restrictions, *, peer: object = ("10.0.0.1", 5), administers: bool = True, **headers: str
) -> object:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return restrictions.refusal(Category.LOGGING, sent.get, peer, administers=administers)


@pytest.mark.parametrize("options", [None, AdminOptions()])
def test_by_default_every_client_administers_the_server(options: AdminOptions | None) -> None:
    restrictions = parse_restrictions((), HTTP, KeyReader(), options)
    assert not restrictions
    assert not restrictions.restricts_admin
    assert asked(restrictions) is None


@pytest.mark.parametrize("peer", [("127.0.0.1", 1), ("::1", 1, 0, 0), ("::ffff:127.0.0.9", 1), "", "@abstract"])
def test_with_local_access_clients_on_the_machine_administer_it(peer: object) -> None:
    restrictions = parse_restrictions((), GRPC, KeyReader(), AdminOptions("local"))
    assert restrictions
    assert asked(restrictions, peer=peer) is None


@pytest.mark.parametrize("peer", [("10.0.0.1", 1), ("::ffff:10.0.0.1", 1), ("fe80::1%lo", 1, 0, 1), None, ()])
def test_with_local_access_others_do_not(peer: object) -> None:
    for protocol, subject in ((HTTP, "This API"), (GRPC, "This protocol")):
        restrictions = parse_restrictions((), protocol, KeyReader(), AdminOptions("local"))
        text = f"{subject} is restricted to clients on the server's machine (--admin-access=local)"
        assert asked(restrictions, peer=peer) == text
        assert asked(restrictions, peer=peer, administers=False) is None


def test_with_a_key_those_who_send_it_administer_the_server() -> None:
    restrictions = parse_restrictions((), HTTP, KeyReader({"KEY": "secret"}), AdminOptions("key", "$KEY"))
    refusal = "This API is restricted, expecting header 'admin-key'"
    assert asked(restrictions) == asked(restrictions, admin_key="Secret") == refusal
    assert asked(restrictions, peer=("127.0.0.1", 1)) == refusal
    assert asked(restrictions, admin_key="secret") is None
    assert asked(restrictions, administers=False) is None
    grpc = parse_restrictions((), GRPC, KeyReader(), AdminOptions("key", "secret"))
    assert asked(grpc) == "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"


def test_the_restriction_of_a_category_holds_as_well() -> None:
    restrictions = parse_restrictions(("logging:k=v",), HTTP, KeyReader(), AdminOptions("key", "secret"))
    assert asked(restrictions, admin_key="secret") == "This API is restricted, expecting header 'k'"
    assert asked(restrictions, k="v") == "This API is restricted, expecting header 'admin-key'"
    assert asked(restrictions, k="v", admin_key="secret") is None


def test_keys_of_flags_come_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a=b:c\n")
    restrictions = parse_restrictions((f"logging:k=@{tmp_path}/key",), HTTP, KeyReader())
    assert asked(restrictions, k="a=b:c", administers=False) is None
    with pytest.raises(BadOption, match="^--grpc-restricted-protocol: the file '/none' with the key cannot be read"):
        parse_restrictions(("logging:k=@/none",), GRPC, KeyReader())
    with pytest.raises(BadOption, match="^--admin-key: the environment variable 'NONE' has no key"):
        parse_restrictions((), GRPC, KeyReader({}), AdminOptions("key", "$NONE"))

"""The line of the start names what is open, to whom, and the flag that closes it."""

from __future__ import annotations

import pytest

from kernel.options import AdminOptions
from protocols.access.exposure import Exposure, OpenPort, describe_exposure
from protocols.access.keys import KeyReader
from protocols.access.restricted import GRPC, HTTP, Category, Restrictions, parse_restrictions

ALL = "model-repository,logging,trace,shared-memory"


def ports(
    *, http: str = "", grpc: str = "", admin: AdminOptions | None = None, local: bool = False, mutual: bool = False
) -> list[OpenPort]:
    def restrictions(text: str, protocol: object) -> Restrictions:
        texts = (f"{text}:k=v",) if text else ()
        return parse_restrictions(texts, HTTP if protocol == "http" else GRPC, KeyReader(), admin)

    return [
        OpenPort("HTTP at a:1", restrictions(http, "http"), local, mutual),
        OpenPort("gRPC at a:2", restrictions(grpc, "grpc"), local, mutual),
    ]


def line(found: list[OpenPort], *, explicit: bool = False, client_shm: str = "local") -> Exposure:
    return describe_exposure(found, explicit=explicit, client_shm=client_shm)


CLOSE = "start the server with --admin-access=local or --admin-access=key to close this"


def test_what_everyone_in_the_network_may_do_is_a_warning() -> None:
    both = "(HTTP at a:1, gRPC at a:2)"
    assert line(ports()) == Exposure(
        f"every client in the network may change settings of the log and change settings of traces {both}: {CLOSE}",
        is_warning=True,
    )
    assert line(ports(), explicit=True, client_shm="true") == Exposure(
        "every client in the network may load and unload models, which run code, register shared memory, change "
        f"settings of the log and change settings of traces {both}: {CLOSE}",
        is_warning=True,
    )


def test_a_port_over_which_only_models_are_loaded_is_named_for_that_alone() -> None:
    http, _ = ports()
    openai = OpenPort("OpenAI's API at a:3", http.restrictions, categories=frozenset({Category.MODEL_REPOSITORY}))
    assert line([http, openai], explicit=True).text == (
        "every client in the network may load and unload models, which run code (HTTP at a:1, OpenAI's API at a:3); "
        "every client in the network may change settings of the log and change settings of traces (HTTP at a:1): "
        f"{CLOSE}"
    )


def test_what_one_protocol_restricts_is_open_over_the_other() -> None:
    assert line(ports(http=ALL), explicit=True) == Exposure(
        "every client in the network may load and unload models, which run code, change settings of the log and "
        f"change settings of traces (gRPC at a:2): {CLOSE}",
        is_warning=True,
    )
    assert line(ports(http="trace")).text == (
        "every client in the network may change settings of the log (HTTP at a:1, gRPC at a:2); every client in the "
        f"network may change settings of traces (gRPC at a:2): {CLOSE}"
    )


@pytest.mark.parametrize(
    ("where", "who"),
    [
        ({"local": True}, "on this machine"),
        ({"mutual": True}, "with a certificate"),
        ({"local": True, "mutual": True}, "on this machine or with a certificate"),
    ],
)
def test_what_only_some_clients_reach_is_information(where: dict[str, bool], who: str) -> None:
    assert line(ports(**where)) == Exposure(  # type: ignore[arg-type]
        f"clients {who} may change settings of the log, change settings of traces and "
        "register shared memory (HTTP at a:1, gRPC at a:2): start the server with --admin-access=key to close this"
    )


@pytest.mark.parametrize(
    ("admin", "who", "flag"),
    [
        (AdminOptions("local"), "only clients on this machine", "--admin-access=local"),
        (AdminOptions("key", "k"), "only clients with the key in the header 'admin-key'", "--admin-access=key"),
    ],
)
def test_what_is_closed_says_who_is_left(admin: AdminOptions, who: str, flag: str) -> None:
    assert line(ports(admin=admin), explicit=True) == Exposure(
        f"{who} may load and unload models, which run code, change settings of the log and change settings of traces "
        f"({flag})"
    )


def test_memory_that_only_clients_on_the_machine_may_register_is_no_warning() -> None:
    restricted = "logging,trace"
    assert line(ports(http=restricted, grpc=restricted)) == Exposure(
        "clients on this machine may register shared memory (HTTP at a:1, gRPC at a:2): start the server with "
        "--admin-access=key to close this"
    )


def test_restrictions_on_both_protocols_close_everything() -> None:
    assert line(ports(http=ALL, grpc=ALL)) == Exposure(
        "nobody may change settings of the log and change settings of traces without the key of a restriction"
    )

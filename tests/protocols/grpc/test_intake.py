import pytest

from protocols.forwarding import ReservedHeader
from protocols.grpc.h2.headers import request_head
from protocols.grpc.intake import MetadataForwarder, make_metadata_forwarder

FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("grpc-timeout", "1S"),
    ("user-agent", "grpc-go"),
    ("x-one", "1"),
    ("x-two", "ü".encode().decode("latin-1")),
    ("x-raw-bin", "/w"),
]


def forwarder(pattern: str) -> MetadataForwarder:
    made = make_metadata_forwarder(pattern)
    assert made is not None
    return made


def test_without_a_pattern_there_is_no_forwarder() -> None:
    assert make_metadata_forwarder("") is None


def test_metadata_and_the_user_agent_are_forwarded_and_nothing_of_grpc_itself() -> None:
    assert forwarder(".*").of_call(request_head(FIELDS)) == {
        "user-agent": "grpc-go",
        "x-one": "1",
        "x-two": "ü",
        "x-raw-bin": "\N{REPLACEMENT CHARACTER}",
    }


def test_names_that_match_are_forwarded() -> None:
    assert forwarder("x-o").of_call(request_head(FIELDS)) == {"x-one": "1"}


def test_a_reserved_name_is_an_error() -> None:
    with pytest.raises(ReservedHeader, match="Header 'timeout' is reserved for Triton usage and cannot be forwarded."):
        forwarder("time").of_call(request_head([*FIELDS, ("timeout", "1")]))

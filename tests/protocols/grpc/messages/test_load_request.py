"""Load requests: large files stay where the message was received, all else is parsed by protobuf."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import InvalidArgument
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.messages.load_request import parse_load_request
from protocols.request_limits import MAX_PARTS


def load_request(**values: bytes | str | int) -> bytes:
    message = pb.RepositoryModelLoadRequest(model_name="m")
    for key, value in values.items():
        if isinstance(value, bytes):
            message.parameters[key].bytes_param = value
        elif isinstance(value, str):
            message.parameters[key].string_param = value
        else:
            message.parameters[key].int64_param = value
    return message.SerializeToString()


def test_large_files_are_views_of_the_message() -> None:
    content = bytes(range(256)) * 400
    values: dict[str, bytes | str] = {"config": "{}", "file:1/large": content, "file:1/small": b"abc"}
    octets = load_request(**values)
    request, files = parse_load_request(octets)
    assert (request.model_name, sorted(request.parameters)) == ("m", ["config", "file:1/small"])
    assert request.parameters["file:1/small"].bytes_param == b"abc"
    assert {key: bytes(found) for key, found in files.items()} == {"file:1/large": content}
    assert files["file:1/large"].obj is octets


def test_large_parameters_that_are_no_files_are_parsed_up_to_a_limit() -> None:
    request, files = parse_load_request(load_request(config="x" * 5000))
    assert (len(request.parameters["config"].string_param), files) == (5000, {})


@pytest.mark.parametrize(
    "octets",
    [
        load_request(config="x" * (2 << 20)),
        load_request(**{f"config{number}": "x" * (1 << 19) for number in range(5)}),
        pb.RepositoryModelLoadRequest(repository_name="x" * (2 << 20)).SerializeToString(),
        pb.RepositoryModelLoadRequest(model_name="x" * (2 << 20)).SerializeToString(),
    ],
    ids=["one", "several", "repository", "model"],
)
def test_long_texts_that_are_no_files_are_refused_before_they_are_parsed(octets: bytes) -> None:
    with pytest.raises(InvalidArgument, match="that are no files take more than 2097152 bytes"):
        parse_load_request(octets)


def test_too_many_parameters_are_refused_before_they_are_parsed() -> None:
    parse_load_request(load_request(**{str(number): number for number in range(MAX_PARTS)}))
    for octets in (load_request(**{str(number): number for number in range(MAX_PARTS + 2)}), b"\x78\0" * 1000):
        with pytest.raises(InvalidArgument, match="the request has too many parameters, expected at most 512"):
            parse_load_request(octets)


@pytest.mark.parametrize("octets", [b"\x1a\xff\xff\xff\xff\x0f", b"\x03", b"\x00\x00", b"\x1a\x05abc"])
def test_what_is_no_message_is_a_decode_error(octets: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_load_request(octets)


def test_a_key_that_is_not_utf_8_is_a_decode_error() -> None:
    octets = load_request(**{"file:1/large": bytes(5000)}).replace(b"large", b"lar\xffe")
    with pytest.raises(DecodeError):
        parse_load_request(octets)


SMALL, LARGE = b"s" * 10, b"L" * 5000


def entry(key: str, content: bytes) -> bytes:
    """A parameter as it is in the message, alone."""
    request = pb.RepositoryModelLoadRequest()
    request.parameters[key].bytes_param = content
    return request.SerializeToString()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([SMALL, LARGE, b"t" * 10, b"M" * 5000])), max_size=6))
def test_of_several_files_with_one_key_the_last_one_counts(entries: list[tuple[str, bytes]]) -> None:
    octets = b"".join(entry(*each) for each in entries)
    request, files = parse_load_request(octets)
    found = {key: value.bytes_param for key, value in request.parameters.items()}
    assert not found.keys() & files.keys()
    found |= {key: bytes(value) for key, value in files.items()}
    expected = pb.RepositoryModelLoadRequest.FromString(octets)
    assert found == {key: value.bytes_param for key, value in expected.parameters.items()}


def test_a_group_with_many_fields_is_refused_and_not_walked_over() -> None:
    """On the event loop a group of 1 MiB would take a second."""
    group = b"\xf3\x01" + b"\x08\x01" * 1000 + b"\xf4\x01"
    with pytest.raises(DecodeError, match="groups with too many fields"):
        parse_load_request(load_request() + group)
    few = b"\xf3\x01" + b"\x08\x01" * 100 + b"\xf4\x01"
    assert parse_load_request(load_request() + few)[0].model_name == "m"
    with pytest.raises(DecodeError, match="groups with too many fields"):  # all groups together
        parse_load_request(load_request() + few + few)

"""Our parser of large request messages against protobuf's: the same requests, tensors and refusals."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from kernel.serving.response import Response
from protocols.grpc import large_request
from protocols.grpc.codec import encode_response, response_parts
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.generated.grpc_service_pb2 import InferTensorContents, ModelInferRequest
from protocols.grpc.large_request import OtherField, are_strings, parse_large_request, write_strings
from protocols.grpc.wire_format import split_raw_contents, varint
from shm.tensor import ClientSpan, Tensor

VARINT, FIXED64, LENGTH, GROUP, GROUP_END, FIXED32 = range(6)


def long_varint(number: int, more: int) -> bytes:
    """A number with `more` bytes than it needs."""
    octets = bytearray(varint(number))
    for _ in range(more):
        octets[-1] |= 0x80
        octets.append(0)
    return bytes(octets)


def tagged(number: int, wire_type: int, more: int, content: bytes) -> bytes:
    return long_varint(number << 3 | wire_type, more) + content


EXTRA = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4, 5, 9, 10])

NUMBERS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 2**29 - 1, 2**29])


def with_length(number: int, more: int, more_of_length: int, content: bytes) -> bytes:
    return tagged(number, LENGTH, more, long_varint(len(content), more_of_length) + content)


def group(number: int, content: bytes, end: int) -> bytes:
    return tagged(number, GROUP, 0, content) + tagged(end, GROUP_END, 0, b"")


def odd_fields() -> st.SearchStrategy[bytes]:
    """Fields of any number and type, groups among them, right and wrong."""
    plain = st.one_of(
        st.builds(
            lambda n, m, v, k: tagged(n, VARINT, m, long_varint(v, k)), NUMBERS, EXTRA, st.integers(0, 300), EXTRA
        ),
        st.builds(lambda n, m: tagged(n, FIXED32, m, b"abcd"), NUMBERS, EXTRA),
        st.builds(lambda n, m: tagged(n, FIXED64, m, b"abcdefgh"), NUMBERS, EXTRA),
        st.builds(with_length, NUMBERS, EXTRA, EXTRA, st.binary(max_size=5)),
        st.builds(lambda n: tagged(n, 6, 0, b""), NUMBERS),
        st.just(tagged(0, VARINT, 0, b"\0")),
    )
    nested = st.recursive(
        plain,
        lambda inner: st.builds(
            lambda n, parts, wrong: group(n, b"".join(parts), n + wrong),
            st.sampled_from([1, 5, 9, 15]),
            st.lists(inner, max_size=3),
            st.sampled_from([0, 0, 0, 0, 1]),
        ),
        max_leaves=4,
    )
    return st.one_of(nested, nested.map(lambda octets: octets[:-1]))


def mixed(usual: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(st.one_of(usual, usual, usual, odd_fields()), max_size=6).map(b"".join)


STRINGS = st.builds(with_length, st.just(8), EXTRA, EXTRA, st.binary(max_size=300))

CONTENTS = mixed(STRINGS)

INPUTS = mixed(
    st.one_of(
        st.builds(with_length, st.sampled_from([1, 2]), EXTRA, EXTRA, st.sampled_from([b"IN", b"BYTES"])),
        st.builds(with_length, st.just(5), EXTRA, EXTRA, CONTENTS),
    )
)

REQUESTS = mixed(
    st.one_of(
        st.builds(with_length, st.sampled_from([1, 2, 3]), EXTRA, EXTRA, st.sampled_from([b"m", b"\xff", b""])),
        st.builds(with_length, st.just(5), EXTRA, EXTRA, INPUTS),
        st.builds(with_length, st.just(7), EXTRA, EXTRA, st.binary(max_size=40)),
    )
)


def protobufs(octets: bytes) -> ModelInferRequest | None:
    try:
        return ModelInferRequest.FromString(octets)
    except DecodeError:
        return None


def ours(octets: bytes) -> ModelInferRequest | None:
    """What our parser makes of a message, put together again."""
    try:
        parts = parse_large_request(octets)
        request = parts.message
        for index, contents in parts.typed_contents.items():
            request.inputs[index].contents.MergeFromString(bytes(contents))
    except DecodeError:
        return None
    request.raw_input_contents.extend(map(bytes, parts.raw_contents))
    return request


@pytest.mark.parametrize("small", [0, 64])
@given(octets=REQUESTS)
@example(octets=group(9, b"", 9))
@example(
    octets=b"".join(tagged(9, GROUP, 0, b"") for _ in range(101)) + b"".join(tagged(9, 4, 0, b"") for _ in range(101))
)
@example(
    octets=tagged(5, VARINT, 0, b"\0") + with_length(5, 0, 0, with_length(1, 0, 0, b"IN") + with_length(5, 0, 0, b""))
)
@example(octets=with_length(7, 4, 0, b"abc"))
@example(octets=with_length(7, 0, 4, b"abc"))
@example(octets=with_length(7, 0, 5, b"abc"))
@example(octets=tagged(9, VARINT, 0, b"\xff" * 9 + b"\x7f"))
def test_a_message_is_parsed_as_protobuf_parses_it(small: int, octets: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_request, "SMALL_BYTE_SIZE", small)
        found, expected = ours(octets), protobufs(octets)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        for each in (found, expected):
            each.DiscardUnknownFields()
        assert found.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


def raw_form(strings: list[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in strings)


@given(CONTENTS)
def test_strings_are_those_that_protobuf_reads(octets: bytes) -> None:
    if not are_strings(octets):
        return
    memory = memoryview(bytearray(2 * len(octets)))
    try:
        expected = InferTensorContents.FromString(octets)
    except DecodeError:
        with pytest.raises((DecodeError, OtherField)):
            write_strings(octets, 1000, memory)
        return
    if len(expected.ListFields()) > 1:
        with pytest.raises(OtherField):
            write_strings(octets, 1000, memory)
    else:
        written = write_strings(octets, 1000, memory)
        assert bytes(memory[:written]) == raw_form(list(expected.bytes_contents))


@given(st.text(), st.lists(st.binary(max_size=300)), st.integers(-(2**63), 2**63 - 1))
def test_the_parts_of_a_message_are_what_protobuf_finds(name: str, raw: list[bytes], number: int) -> None:
    message = pb.ModelInferRequest(model_name=name, raw_input_contents=raw)
    message.inputs.add(name=name, shape=[number])
    message.parameters["a"].int64_param = number
    split = split_raw_contents(message.SerializeToString())
    assert split is not None
    rest, contents = split
    assert [bytes(content) for content in contents] == raw
    del message.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(rest) == message


@given(st.binary(max_size=40))
def test_what_protobuf_refuses_is_refused_or_left_to_it(octets: bytes) -> None:
    split = split_raw_contents(octets)
    try:
        expected = pb.ModelInferRequest.FromString(octets)
    except DecodeError:
        if split is not None:
            try:
                pb.ModelInferRequest.FromString(split[0])
            except DecodeError:
                return
            raise AssertionError("protobuf refuses the message, the parts are taken") from None
        return
    if split is not None:
        parsed = pb.ModelInferRequest.FromString(split[0])
        parsed.raw_input_contents.extend(map(bytes, split[1]))
        assert list(parsed.raw_input_contents) == list(expected.raw_input_contents)
        assert parsed.model_name == expected.model_name


@given(st.text(max_size=5), st.lists(st.none() | st.binary(max_size=200), max_size=4), st.booleans())
def test_a_response_in_parts_is_the_response_that_protobuf_writes(
    name: str, data: list[bytes | None], flag: bool
) -> None:
    outputs = [
        Tensor(name, "UINT8", [1], client_span=ClientSpan("r", 1))
        if content is None
        else Tensor(name, "UINT8", [1], memoryview(content))
        for content in data
    ]
    response = Response("model", "1", name, outputs=outputs, parameters={"flag": flag})
    message = pb.ModelInferResponse()
    encode_response(response, message)
    assert pb.ModelInferResponse.FromString(b"".join(response_parts(response))) == message


def test_a_group_with_many_fields_is_left_to_a_helper() -> None:
    """To walk over its fields would keep the event loop for a microsecond each."""
    group = b"\xf3\x01" + b"\x08\x01" * 1000 + b"\xf4\x01"
    assert split_raw_contents(pb.ModelInferRequest(model_name="m").SerializeToString() + group) is None

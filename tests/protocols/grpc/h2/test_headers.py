"""Header blocks: the request heads that they stand for, which are remembered, and blocks that clients understand."""

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from protocols.grpc.h2.frames import ConnectionFailure, H2ErrorCode
from protocols.grpc.h2.headers import RequestHeadDecoder, encode_block, encode_trailers, request_head, status_trailers

FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a/b"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


def test_a_grpc_call_is_recognised_by_its_headers() -> None:
    head = request_head([*FIELDS, ("grpc-encoding", "gzip"), ("grpc-timeout", "10m"), ("content-length", "7")])
    assert (head.fault, head.path, head.is_grpc, head.encoding) == ("", "/a/b", True, "gzip")
    assert head.timeout_s == pytest.approx(0.01)
    assert head.content_length == 7


@pytest.mark.parametrize(
    "change",
    [(":method", "GET"), ("content-type", "application/json"), ("content-type", "application/grpc+json")],
)
def test_other_requests_are_not_taken_for_grpc_calls(change: tuple[str, str]) -> None:
    head = request_head([change if field[0] == change[0] else field for field in FIELDS])
    assert head.fault == ""
    assert not head.is_grpc


@pytest.mark.parametrize("text", ["", "1", "m", "1x", "-1S", "123456789S", "9" * 5000 + "S"])
def test_an_invalid_timeout_is_noted(text: str) -> None:
    assert not request_head([*FIELDS, ("grpc-timeout", text)]).timeout_valid


@given(st.lists(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.text("xyz", max_size=3)), max_size=3)))
def test_a_remembered_block_means_what_a_plain_decoder_says(requests: list[list[tuple[str, str]]]) -> None:
    encoder, plain, remembering = Encoder(), Decoder(), RequestHeadDecoder()
    encoder.header_table_size = 80  # so that entries are evicted
    plain.max_allowed_table_size = 4096
    for more in requests:
        for _ in range(3):
            block = encoder.encode([*FIELDS, *more])
            expected = [(str(name), str(value)) for name, value in plain.decode(block)]
            assert remembering.decode(block).fields == expected


def test_a_repeated_block_is_decoded_once() -> None:
    encoder, decoder = Encoder(), RequestHeadDecoder()
    decoder.decode(encoder.encode(FIELDS))  # fills the table
    block = encoder.encode(FIELDS)
    assert decoder.decode(block) is decoder.decode(block)


def test_blocks_that_are_not_hpack_end_the_connection() -> None:
    with pytest.raises(ConnectionFailure) as caught:
        RequestHeadDecoder().decode(b"\xff\xff\xff\xff\x0f")
    assert caught.value.code is H2ErrorCode.COMPRESSION_ERROR


@given(st.lists(st.tuples(st.text("abc-", min_size=1), st.text(st.characters(max_codepoint=255), max_size=400))))
def test_encoded_blocks_are_understood_and_leave_the_table_alone(fields: list[tuple[str, str]]) -> None:
    decoder = Decoder()
    decoded = decoder.decode(encode_block(fields), raw=True)
    assert [(bytes(n).decode("latin-1"), bytes(v).decode("latin-1")) for n, v in decoded] == fields
    assert not decoder.header_table.dynamic_entries


def test_a_status_without_a_text_has_no_message() -> None:
    assert [(str(name), str(value)) for name, value in Decoder().decode(status_trailers(5, None).block)] == [
        (":status", "200"),
        ("content-type", "application/grpc+proto"),
        ("grpc-status", "5"),
    ]


def test_a_passed_deadline_has_the_text_of_grpcs_own_servers() -> None:
    for trailers in (status_trailers(4, None), encode_trailers([("grpc-status", "4")])):
        fields = [(str(name), str(value)) for name, value in Decoder().decode(trailers.block)]
        assert fields[-2:] == [("grpc-status", "4"), ("grpc-message", "Deadline Exceeded")]


def test_metadata_may_begin_and_end_with_spaces() -> None:
    head = request_head([*FIELDS, ("a", " b\t"), ("c", " ")])
    assert head.fault == ""
    assert head.fields[-2:] == [("a", " b\t"), ("c", " ")]


def test_trailers_say_the_status_in_their_block() -> None:
    refused = [(":status", "200"), ("content-type", "application/grpc+proto"), ("grpc-status", "5")]
    assert encode_trailers(refused).grpc_status == status_trailers(5, "text").grpc_status == 5
    assert encode_trailers(refused).block == encode_block(refused)
    not_grpc = encode_trailers([(":status", "415"), ("grpc-message", "text")])
    assert (not_grpc.grpc_status, not_grpc.http_status) == (None, "415")


def test_what_is_remembered_of_header_blocks_is_limited_by_what_it_takes() -> None:
    decoder = RequestHeadDecoder()
    decoder.decode(encode_block(FIELDS) + b"\x40\x01x\x7f\xa1\x1e" + b"a" * 4000)
    for number in range(60):
        block = encode_block([*FIELDS, ("number", str(number))]) + b"\xbe" * 3
        assert decoder.decode(block).byte_size > 12_000
        assert sum(head.byte_size for head in decoder.known.values()) <= 128 << 10
    assert decoder.known

import gzip
import zlib

import pytest

from protocols.grpc.compression import compressed, make_compression
from protocols.grpc.framing import PREFIX
from protocols.grpc.h2.headers import RequestHead, request_head


def head(accepted: str | None) -> RequestHead:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/a")]
    return request_head(fields if accepted is None else [*fields, ("grpc-accept-encoding", accepted)])


def test_without_a_level_nothing_is_compressed() -> None:
    assert make_compression("none") is None


@pytest.mark.parametrize(
    ("level", "accepted", "chosen"),
    [
        ("low", "identity, deflate, gzip", "gzip"),
        ("medium", "identity,deflate,gzip", "deflate"),
        ("high", "gzip,deflate", "deflate"),
        ("high", "identity,gzip", "gzip"),
        ("low", "deflate", "deflate"),
        ("high", "identity,snappy", None),
        ("high", None, None),
    ],
)
def test_the_level_chooses_among_what_the_client_accepts(level: str, accepted: str | None, chosen: str | None) -> None:
    compression = make_compression(level)
    assert compression is not None
    assert compression.choose(head(accepted)) == chosen


def test_a_message_is_compressed_with_its_flag_and_its_new_length() -> None:
    parts: list[bytes | memoryview] = [b"a" * 1000, memoryview(b"b" * 1000)]
    message = compressed("gzip", parts)
    assert PREFIX.unpack_from(message) == (1, len(message) - PREFIX.size)
    assert gzip.decompress(message[PREFIX.size :]) == b"a" * 1000 + b"b" * 1000
    assert zlib.decompress(compressed("deflate", parts)[PREFIX.size :]) == b"a" * 1000 + b"b" * 1000


def test_a_message_that_would_grow_stays_as_it_is() -> None:
    assert compressed("gzip", [b"ab", b"c"]) == PREFIX.pack(0, 3) + b"abc"

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import InvalidArgument
from protocols.http.inference.compression import (
    UnsupportedCompression,
    check_encoding,
    choose_encoding,
    compress,
    decompress,
)


@given(st.binary(min_size=1), st.sampled_from(["gzip", "deflate"]))
def test_what_is_compressed_can_be_decompressed(content: bytes, encoding: str) -> None:
    assert decompress(compress(content, encoding), len(content)) == content


def test_either_format_is_recognised_and_bytes_behind_it_are_ignored() -> None:
    assert decompress(gzip.compress(b"content") + b"more", 100) == b"content"
    assert decompress(zlib.compress(b"content"), 100) == b"content"


def test_a_bomb_is_refused_at_the_limit() -> None:
    with pytest.raises(InvalidArgument) as caught:
        decompress(gzip.compress(bytes(10_000_000)), 9_999_999)
    assert caught.value.message == (
        "Decompressed data size exceeds the maximum allowed value of 9999999 bytes. "
        "Use --http-max-input-size to increase the limit."
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "nothing to be decompressed"),
        (b"garbage", "unable to decompress the request body"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-12], "cut short"),
    ],
)
def test_broken_bodies_are_refused(body: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        decompress(body, 10_000)


@given(st.binary())
def test_any_body_is_inflated_or_refused(body: bytes) -> None:
    try:
        decompress(body, 1000)
    except InvalidArgument as error:
        body = error.message.encode()
    assert isinstance(body, bytes)


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("gzip;q=0", "identity"),
        ("identity;q=0.5, gzip;q=0.5", "identity"),
        ("identity;q=0.2,deflate;q=0.3", "deflate"),
        ("br, gzip", "gzip"),
        ("*", "identity"),
        ("gzip;Q=0.1 , deflate ; level=1 ; q = 0.5", "deflate"),
        ("gzip;;q=0", "identity"),
        ("gzip;q=abc", "identity"),
        ("GZIP", "identity"),
        (",;=,", "identity"),
        ("", "identity"),
    ],
)
def test_the_coding_with_the_highest_weight_is_chosen(accept: str, encoding: str) -> None:
    assert choose_encoding(accept) == encoding


@pytest.mark.parametrize("encoding", ["br", "gzip, deflate", "GZIP", ""])
def test_other_codings_are_refused(encoding: str) -> None:
    with pytest.raises(UnsupportedCompression, match="^Unsupported compression type$"):
        check_encoding(encoding)

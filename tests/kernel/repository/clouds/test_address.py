"""Addresses of repositories in clouds."""

from __future__ import annotations

import pytest

from kernel.repository.clouds.address import BadAddress, CloudAddress, is_address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://bucket", CloudAddress("s3", "bucket")),
        ("s3://bucket/a/b", CloudAddress("s3", "bucket", "a/b")),
        ("s3://bucket//a/b/", CloudAddress("s3", "bucket", "a/b")),
        ("s3://host:9000/bucket/a", CloudAddress("s3", "bucket", "a", endpoint="http://host:9000")),
        ("s3://10.0.0.1:9000/bucket", CloudAddress("s3", "bucket", endpoint="http://10.0.0.1:9000")),
        ("s3://[::1]:9000/bucket", CloudAddress("s3", "bucket", endpoint="http://[::1]:9000")),
        ("s3://http://host:80/bucket/a", CloudAddress("s3", "bucket", "a", endpoint="http://host:80")),
        ("s3://https://host:443/bucket/a", CloudAddress("s3", "bucket", "a", endpoint="https://host:443")),
        ("gs://bucket/a", CloudAddress("gs", "bucket", "a")),
        ("as://account/container/a/b", CloudAddress("as", "container", "a/b", account="account")),
        ("as://account/container", CloudAddress("as", "container", account="account")),
    ],
)
def test_an_address_is_parsed(text: str, address: CloudAddress) -> None:
    assert is_address(text)
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


def test_an_address_is_shown_as_it_is_written() -> None:
    for text in ("s3://bucket/a", "s3://host:9000/bucket", "s3://https://host:1/bucket/a", "as://account/container/a"):
        assert str(parse_address(text)) == text
    assert parse_address("gs://bucket/a/b").root == "bucket/a/b"
    assert parse_address("gs://bucket").root == "bucket"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://", "names no bucket: expected s3://BUCKET/FOLDER"),
        ("s3:///", "names no bucket"),
        ("s3://host:9000", "names no bucket"),
        ("s3://https://host/bucket", "has no port: expected s3://https://HOST:PORT/BUCKET/FOLDER"),
        ("gs://", "names no bucket: expected gs://BUCKET/FOLDER"),
        ("as://account", "names no container: expected as://ACCOUNT/CONTAINER/FOLDER"),
        ("s3://my bucket/a", "'my bucket' cannot be the name of a bucket"),
        ("s3://user:password@bucket/a", "cannot be the name of a bucket"),
        ("s3://bucket/../a", "'.', '..'"),
        ("s3://bucket/a\n", "not printable"),
    ],
)
def test_a_wrong_address_says_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(BadAddress) as raised:
        parse_address(text)
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["models", "/s3/models", "s3:/bucket", "S3://bucket", "http://host/a", "s3"])
def test_other_texts_are_no_addresses(text: str) -> None:
    assert not is_address(text)

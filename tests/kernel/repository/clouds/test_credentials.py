"""Which credentials a repository gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernel.repository.clouds.address import parse_address
from kernel.repository.clouds.credentials import BadCredentials, Credentials, client_arguments, parse_credentials

GIVEN: dict[str, Any] = {
    "s3": {
        "": {"key_id": "id", "secret_key": "secret", "region": "eu-west-1", "session_token": "", "profile": ""},
        "s3://other": {"profile": "team"},
        "s3://other/inner": {"key_id": "inner", "secret_key": "s", "session_token": "t"},
    },
    "gs": {"": "/keys/all.json", "gs://other": "/keys/other.json"},
    "as": {"": {"account_str": "account", "account_key": "key"}},
}


def arguments(address: str, given: dict[str, Any], **environment: str) -> dict[str, Any]:
    return client_arguments(parse_address(address), parse_credentials(json.dumps(given).encode()), environment)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("s3://bucket", {"key": "id", "secret": "secret", "client_kwargs": {"region_name": "eu-west-1"}}),
        ("s3://other/a", {"profile": "team"}),
        ("s3://other", {"profile": "team"}),
        ("s3://others", {"key": "id", "secret": "secret", "client_kwargs": {"region_name": "eu-west-1"}}),
        ("s3://other/inner/a", {"key": "inner", "secret": "s", "token": "t"}),
        ("gs://bucket/a", {"token": "/keys/all.json"}),
        ("gs://other/a", {"token": "/keys/other.json"}),
        ("as://account/container", {"account_name": "account", "account_key": "key"}),
    ],
)
def test_of_the_entries_that_an_address_begins_with_the_longest_is_used(address: str, expected: dict[str, Any]) -> None:
    assert arguments(address, GIVEN) == expected


def test_without_a_file_the_clients_look_themselves() -> None:
    nothing = Credentials()
    assert client_arguments(parse_address("s3://bucket"), nothing, {}) == {}
    assert client_arguments(parse_address("gs://bucket"), nothing, {}) == {}
    assert client_arguments(parse_address("s3://host:9000/bucket"), nothing, {}) == {"endpoint_url": "http://host:9000"}


def test_azure_takes_the_key_of_the_environment_for_its_own_account_only() -> None:
    key = {"AZURE_STORAGE_ACCOUNT": "mine", "AZURE_STORAGE_KEY": "key"}
    assert arguments("as://mine/c", {}, **key) == {"account_name": "mine", "account_key": "key"}
    assert arguments("as://other/c", {}, **key) == {"account_name": "other", "anon": False}
    assert arguments("as://mine/c", {}, AZURE_STORAGE_KEY="key")["account_key"] == "key"
    assert arguments("as://mine/c", {}) == {"account_name": "mine", "anon": False}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"s3": {"": "secret"}}', "Expected `object`, got `str` - at `$.s3[...]`"),
        (b'{"s3": {', "truncated"),
        (b'{"gs": {"": 5}}', "Expected `str`"),
    ],
)
def test_a_wrong_file_is_refused_and_no_value_of_it_is_shown(content: bytes, message: str) -> None:
    with pytest.raises(BadCredentials) as raised:
        parse_credentials(content)
    assert message in str(raised.value)
    assert "secret" not in str(raised.value)

"""A file of credentials is read at the start, and again when it has changed.

Which credentials a repository gets.
"""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InternalError
from kernel.repository.clouds.address import parse_address
from kernel.repository.clouds.messages import Place
from kernel.repository.clouds.places import (
    BadCredentials,
    Credentials,
    RepositoryPlace,
    client_arguments,
    parse_credentials,
)

if TYPE_CHECKING:
    from pathlib import Path

ADDRESS = parse_address("s3://bucket/repo")


def write(file: Path, key: object) -> dict[str, str]:
    """Write a file of credentials as the stores of secrets do, and return the variable that names it."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"s3": {"": {"key_id": key}}}))
    os.replace(new, file)
    return {"TRITON_CLOUD_CREDENTIAL_PATH": str(file)}


def test_a_wrong_file_of_credentials_is_named(tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    with pytest.raises(InternalError, match=r"credentials.json' \(TRITON_CLOUD_CREDENTIAL_PATH\): No such file"):
        RepositoryPlace(ADDRESS, {"TRITON_CLOUD_CREDENTIAL_PATH": str(file)})
    with pytest.raises(InternalError, match="Expected `str`, got `int`"):
        RepositoryPlace(ADDRESS, write(file, 5))
    assert RepositoryPlace(ADDRESS, write(file, "id")).now() == Place("s3", "bucket/repo", {"key": "id"})
    assert RepositoryPlace(ADDRESS, {}).now() == Place("s3", "bucket/repo", {})


def test_new_credentials_are_used_and_wrong_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    file = tmp_path / "credentials.json"
    place = RepositoryPlace(ADDRESS, write(file, "first"))
    write(file, "second")
    assert place.now().arguments == {"key": "second"}
    write(file, 5)
    assert [place.now().arguments for _ in range(3)] == [{"key": "second"}] * 3
    file.unlink()
    assert place.now().arguments == {"key": "second"}
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        f"the former credentials for s3://bucket/repo are used on: failed to read credentials from '{file}'"
    ] * 2
    write(file, "third")
    assert place.now().arguments == {"key": "third"}


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

"""A file of credentials is read at the start, and again when it has changed."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING

import pytest

from kernel.errors import InternalError
from kernel.repository.clouds.address import parse_address
from kernel.repository.clouds.messages import Place
from kernel.repository.clouds.places import RepositoryPlace

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

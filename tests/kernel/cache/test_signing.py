"""A signed value is one that a server with the same key has stored under the same key of the store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kernel.cache.encoding import BadEntry
from kernel.cache.signing import Signing, read_signing_key
from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

SIGNING = Signing(b"0123456789abcdef")


def test_a_signed_value_is_read_by_servers_with_the_key_only() -> None:
    stored = SIGNING.signed(b"key", b"value")
    assert bytes(Signing(b"0123456789abcdef").verified(b"key", stored)) == b"value"
    other = Signing(b"0123456789abcdeF")
    assert other.name != SIGNING.name
    with pytest.raises(BadEntry, match="a wrong signature"):
        other.verified(b"key", stored)


@pytest.mark.parametrize("change", [0, 31, 32, 36])
def test_a_changed_value_is_refused(change: int) -> None:
    stored = bytearray(SIGNING.signed(b"key", b"value"))
    stored[change] ^= 1
    with pytest.raises(BadEntry):
        SIGNING.verified(b"key", bytes(stored))


@pytest.mark.parametrize("stored", [b"", b"value", bytes(32), bytes(100)])
def test_an_unsigned_value_is_refused(stored: bytes) -> None:
    with pytest.raises(BadEntry):
        SIGNING.verified(b"key", stored)


def test_a_value_under_another_key_is_refused() -> None:
    with pytest.raises(BadEntry):
        SIGNING.verified(b"yek", SIGNING.signed(b"key", b"value"))


def test_the_key_is_the_content_of_its_file_without_line_feeds_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"0123456789abcdef\n")
    assert read_signing_key(str(tmp_path / "key")).name == SIGNING.name


def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"secret\n")
    os.mkfifo(tmp_path / "fifo")
    for name, reason in (("short", "16 to 4096 bytes"), ("absent", "No such file"), ("fifo", "it is a FIFO")):
        with pytest.raises(InvalidArgument, match=reason):
            read_signing_key(str(tmp_path / name))

"""Keys come from files and environment variables, too, and a source without a usable key stops the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.options import BadOption
from protocols.access.keys import KeyReader

if TYPE_CHECKING:
    from pathlib import Path

FLAG = "http-restricted-api"


@pytest.mark.parametrize(
    ("text", "key"),
    [("secret", b"secret"), ("@@a", b"@a"), ("$$a", b"$a"), ("a@b$c", b"a@b$c"), ("@@", b"@"), ("é", "é".encode())],
)
def test_a_text_is_the_key(text: str, key: bytes) -> None:
    assert KeyReader({}).read(text, FLAG) == key


@pytest.mark.parametrize("content", [b"secret", b"secret\n", b"secret\r\n"])
def test_a_file_holds_the_key_with_or_without_a_line_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    assert KeyReader({}).read(f"@{tmp_path}/key", FLAG) == b"secret"


def test_a_variable_holds_the_key() -> None:
    assert KeyReader({"KEY": "secret"}).read("$KEY", FLAG) == b"secret"


def test_a_source_is_read_once(tmp_path: Path) -> None:
    """Two front doors may have the same key, and a pipe (`@/dev/fd/3`) gives it only once."""
    file, reader = tmp_path / "key", KeyReader({})
    file.write_text("secret")
    assert reader.read(f"@{file}", FLAG) == b"secret"
    file.unlink()
    assert reader.read(f"@{file}", "grpc-restricted-protocol") == b"secret"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("$NONE", "the environment variable 'NONE' has no key"),
        ("$", "the environment variable '' has no key"),
        ("$EMPTY", "the environment variable 'EMPTY' has no key"),
        ("@{}/none", "none' with the key cannot be read: No such file or directory"),
        ("@", "' with the key cannot be read"),
        ("@{}", "with the key cannot be read: Is a directory"),
        ("@{}/empty", "empty' has no key"),
        ("@{}/two_lines", "has a line end"),
        ("@{}/large", "more than 4096 bytes"),
        ("@{}/spaces", "a space at its beginning or end"),
        ("", "the text has no key"),
    ],
)
def test_a_source_without_a_usable_key_is_an_error_that_names_the_flag(tmp_path: Path, text: str, problem: str) -> None:
    for name, content in (("empty", "\n"), ("two_lines", "a\nb\n"), ("large", "x" * 5000), ("spaces", "a \n")):
        (tmp_path / name).write_text(content)
    with pytest.raises(BadOption) as caught:
        KeyReader({"EMPTY": ""}).read(text.format(tmp_path), FLAG)
    assert str(caught.value).startswith(f"--{FLAG}: ")
    assert problem in str(caught.value)

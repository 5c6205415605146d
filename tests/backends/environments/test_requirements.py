"""What files of requirements ask for, and when their environment is another one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from backends.environments.messages import EnvironmentFailed
from backends.environments.requirements import allows, archive_key, read_requirements

if TYPE_CHECKING:
    from pathlib import Path


def key(file: Path) -> str:
    return read_requirements(file).key


def test_a_change_of_the_file_or_of_one_that_it_includes_is_another_environment(tmp_path: Path) -> None:
    file, base, limits = tmp_path / "requirements.txt", tmp_path / "base.txt", tmp_path / "limits.txt"
    file.write_text("-r base.txt\n--constraint=limits.txt\nsix  # a comment\n")
    base.write_text("attrs\n-r requirements.txt\n")
    limits.write_text("six<2\n")
    first = read_requirements(file)
    assert first.arguments == ("-r", str(file))
    assert first.files == tuple(sorted(map(str, (file, base, limits))))
    assert key(file) == first.key
    limits.write_text("six<1.17\n")
    second = key(file)
    assert second != first.key
    base.write_text("attrs>20\n")
    assert key(file) not in (first.key, second)


def test_a_change_of_a_package_in_the_folder_is_another_environment(tmp_path: Path) -> None:
    file, wheel = tmp_path / "requirements.txt", tmp_path / "wheels" / "mine-1-py3-none-any.whl"
    file.write_text("./wheels/mine-1-py3-none-any.whl\nother @ https://example.com/a/b.whl\n")
    wheel.parent.mkdir()
    wheel.write_bytes(b"one")
    first = key(file)
    wheel.write_bytes(b"two two")
    assert key(file) != first


def test_a_project_has_its_dependencies_and_no_text_of_it_is_an_option(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nname = "m"\nrequires-python = ">=3.10"\ndependencies = ["six>1", "--index-url=x"]\n')
    found = read_requirements(file)
    assert (found.arguments, found.python) == (("--", "six>1", "--index-url=x"), ">=3.10")
    file.write_text(file.read_text() + "\n[tool.ruff]\nline-length = 100\n")
    assert key(file) == found.key, "only what is installed counts"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("requirements.txt", "-r missing.txt", "missing.txt"),
        ("pyproject.toml", "[project", "cannot be read"),
        ("pyproject.toml", "[project]\ndependencies = [1]", "must be a list of texts"),
        ("pyproject.toml", '[project]\ndependencies = "six"', "must be a list of texts"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(EnvironmentFailed, match=reason):
        read_requirements(tmp_path / name)


@pytest.mark.parametrize(
    ("python", "allowed"),
    [
        ("", True), (">=3.9", True), (">=3.12", False), (">=3.9,<3.12", True), (">=3.9, <3.11", False),
        ("==3.11.*", True), ("!=3.11.*", False), ("~=3.10", True), ("~=3.11.2", True), ("~=3.10.1", False),
        ("<=3.11", False), (">3.11.6", True), ("==3.11.7", True), ("<4", True), ("!=3.11.7", False),
    ],
)  # fmt: skip
def test_versions_of_python(python: str, *, allowed: bool) -> None:
    assert allows(python, (3, 11, 7)) is allowed


def test_a_version_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(EnvironmentFailed, match="requires-python has 'new', expected versions such as"):
        allows(">=3.9,new", (3, 11, 7))


def test_the_key_of_an_archive_is_that_of_its_content(tmp_path: Path) -> None:
    cache, archive, copy = tmp_path / "cache", tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    cache.mkdir()
    archive.write_bytes(b"content")
    copy.write_bytes(b"content")
    assert archive_key(archive, cache) == archive_key(copy, cache)
    first = archive_key(archive, cache)
    archive.write_bytes(b"another")
    assert archive_key(archive, cache) != first


def test_the_digest_of_an_archive_that_has_not_changed_is_not_computed_again(tmp_path: Path) -> None:
    cache, archive = tmp_path / "cache", tmp_path / "a.tar.gz"
    cache.mkdir()
    archive.write_bytes(b"content")
    first, status = archive_key(archive, cache), archive.stat()
    with archive.open("r+b") as file:
        file.write(b"changed")
    os.utime(archive, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert archive_key(archive, cache) == first, "its size, time and number are the same: it was not read"
    [remembered] = cache.iterdir()
    remembered.write_text("no digest")
    assert archive_key(archive, cache) != first

"""What files of requirements ask for, and when their environment is another one.

How packages are installed, with programs that play uv, and with pip without an index.
"""

from __future__ import annotations

import os
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from backends.environments.interpreter import ask, interpreter_in, variables_of
from backends.environments.messages import EnvironmentFailed
from backends.environments.requirements import (
    INTERVAL_NS,
    Installer,
    Requirements,
    ShownLines,
    allows,
    archive_key,
    read_requirements,
)

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


#: Plays uv: writes down its arguments, and makes a `bin/python` that is this interpreter.
UV = f"""#!{sys.executable}
import os, sys
with open(os.environ["PLAYED_UV"], "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
print("resolved a package")
if sys.argv[1] == "venv":
    os.makedirs(sys.argv[-1] + "/bin", exist_ok=True)
    python = sys.argv[-1] + "/bin/python"
    with open(python, "w") as file:
        file.write('#!/bin/sh\\nexec {sys.executable} "$@"\\n')
    os.chmod(python, 0o755)
elif "bad" in sys.argv:
    sys.exit("  x No solution found: bad is not there")
"""


class Played:
    """An installer with the played uv."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands = tmp_path / "commands"
        monkeypatch.setenv("PLAYED_UV", str(self.commands))
        uv = tmp_path / "uv"
        uv.write_text(UV)
        uv.chmod(0o755)
        self.said: list[str] = []
        self.file = tmp_path / "requirements.txt"
        self.file.write_text("six\n")
        self.folder = tmp_path / "made"
        self.folder.mkdir()
        self.installer = Installer(self.file, self.said.append, str(uv))

    def make(self, *arguments: str, python: str = "") -> list[str]:
        self.installer.make(self.folder, Requirements(arguments, python, "key", ()))
        return self.commands.read_text().splitlines()


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def test_uv_makes_the_environment_and_installs(played: Played) -> None:
    commands = played.make("-r", str(played.file))
    assert commands == [
        f"venv --quiet --no-project --allow-existing --python {sys.executable} {played.folder}",
        f"pip install --python {played.folder}/bin/python -r {played.file}",
    ]
    assert played.said[0] == f"installing the packages of '{played.file}' with uv"
    assert "resolved a package" in played.said
    assert played.said[-1].startswith(f"the packages of '{played.file}' were installed in ")


def test_uv_is_asked_for_another_python_where_ours_does_not_fit(played: Played) -> None:
    assert " --python <3 " in played.make("six", python="<3")[0]


def test_the_end_of_what_the_installer_has_printed_is_the_reason(played: Played) -> None:
    with pytest.raises(EnvironmentFailed) as failure:
        played.make("bad")
    assert str(failure.value) == (
        f"the packages of '{played.file}' cannot be installed (the server ignores this file with "
        "--install-requirements=false): resolved a package; x No solution found: bad is not there"
    )


def test_without_uv_another_python_is_refused(played: Played) -> None:
    installer = Installer(played.file, played.said.append, "")
    with pytest.raises(EnvironmentFailed, match=r"requires Python <3, and the server has 3\..*where uv is installed"):
        installer.make(played.folder, Requirements(("six",), "<3", "key", ()))


def wheel(folder: Path, name: str, content: str) -> None:
    """Write a package that is installed without an index."""
    about = f"{name}-1.dist-info"
    record = "".join(
        f"{path},,\n" for path in (f"{name}.py", *(f"{about}/{n}" for n in ("METADATA", "WHEEL", "RECORD")))
    )
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as opened:
        opened.writestr(f"{name}.py", content)
        opened.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        opened.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr(f"{about}/RECORD", record)


@pytest.mark.slow
def test_pip_installs_packages_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy is a package that plays it: no index is asked."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    for name in ("numpy", "msgspec", "mine"):
        wheel(tmp_path, name, "__version__ = '1'\n")
    file = tmp_path / "requirements.txt"
    file.write_text("./numpy-1-py3-none-any.whl\n./msgspec-1-py3-none-any.whl\n./mine-1-py3-none-any.whl\n")
    folder, said = tmp_path / "made", list[str]()
    folder.mkdir()
    Installer(file, said.append, "").make(folder, read_requirements(file))
    found = ask(interpreter_in(folder), variables_of(folder, os.environ), "it")
    assert (found.numpy, found.msgspec) == ("1", "1")
    assert list(folder.glob("lib/*/site-packages/mine.py"))
    file.write_text("not-there-at-all\n")
    with pytest.raises(EnvironmentFailed, match="ERROR: No matching distribution found for not-there-at-all"):
        Installer(file, said.append, "").make(folder, read_requirements(file))


def test_lines_of_progress_come_at_intervals() -> None:
    lines = ShownLines()
    shown = [lines.shows(now) for now in (0, 1, INTERVAL_NS - 1, INTERVAL_NS, INTERVAL_NS + 1, 3 * INTERVAL_NS)]
    assert shown == [True, False, False, True, False, True]

"""Archives of environments are unpacked into their folder and nowhere else."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from backends.environments import archive as archive_module
from backends.environments.archive import unpack
from backends.environments.messages import EnvironmentFailed

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 1 << 20


def member(name: str, content: bytes = b"", **more: object) -> tuple[tarfile.TarInfo, bytes]:
    found = tarfile.TarInfo(name)
    found.size, found.mtime = len(content), 1_600_000_000
    for key, value in more.items():
        setattr(found, key, value)
    return found, content


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.SYMTYPE, linkname=target)


def tar(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as opened:  # type: ignore[call-overload]
        for info, content in members:
            opened.addfile(info, io.BytesIO(content))
    return path


def unpacked(archive: Path, tmp_path: Path, limit: int = LIMIT) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    unpack(archive, folder, limit, "it is too large", lambda line: None)
    return folder


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_files_folders_and_links_of_a_tar_are_unpacked(tmp_path: Path, mode: str) -> None:
    archive = tar(
        tmp_path / "env",
        member("./bin", type=tarfile.DIRTYPE),
        link("bin/python", "python3.9"),
        member("bin/python3.9", b"program", mode=0o4755),
        member("bin/other", type=tarfile.LNKTYPE, linkname="bin/python3.9"),
        member("./lib/deep/module.py", b"x = 1", mode=0o444),
        link("lib64", "lib"),
        mode=mode,
    )
    folder = unpacked(archive, tmp_path)
    assert (folder / "bin/python").read_bytes() == b"program"
    assert (folder / "lib64/deep/module.py").read_text() == "x = 1"
    assert stat.S_IMODE((folder / "bin/python3.9").stat().st_mode) == 0o755, "without the bit that changes the user"
    assert (folder / "lib/deep/module.py").stat().st_mtime == 1_600_000_000, "compiled modules name it"
    assert (folder / "bin/other").stat().st_ino == (folder / "bin/python3.9").stat().st_ino


def test_a_zip_with_links_and_modes_is_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "env.zip", "w") as opened:
        program = zipfile.ZipInfo("bin/python3.9", (2024, 1, 2, 3, 4, 6))
        program.external_attr = (stat.S_IFREG | 0o755) << 16
        opened.writestr(program, "program")
        python = zipfile.ZipInfo("bin/python")
        python.external_attr = (stat.S_IFLNK | 0o777) << 16
        opened.writestr(python, "python3.9")
        opened.mkdir("empty")
    folder = unpacked(tmp_path / "env.zip", tmp_path)
    assert os.readlink(folder / "bin/python") == "python3.9"
    assert os.access(folder / "bin/python", os.X_OK)
    assert (folder / "empty").is_dir()


BAD = {
    "above": [member("../outside", b"x")],
    "absolute": [member("/tmp/naiad-outside", b"x")],
    "hidden above": [member("bin/../../outside", b"x")],
    "link to above": [link("bin/python", "../../outside")],
    "absolute link": [link("python", "/bin/sh")],
    "link without a target": [link("python", "")],
    "through a link": [link("d/b", "../d/e/f"), member("d/e/f/x", b""), link("a", "d/b/../../../../x")],
    "in a linked folder": [link("lib64", "lib"), member("lib/x", b""), link("lib64/y", "x")],
    "over a linked folder": [member("a/b/c/x", b""), link("s", "a/b/c"), link("t", "s/../../../..")],
    "device": [member("null", type=tarfile.CHRTYPE)],
    "pipe": [member("pipe", type=tarfile.FIFOTYPE)],
    "same as above": [member("x", type=tarfile.LNKTYPE, linkname="../outside")],
}


@pytest.mark.parametrize("name", BAD)
def test_what_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("kept")
    archive = tar(tmp_path / "env.tar.gz", *BAD[name])
    with pytest.raises(EnvironmentFailed, match="the archive has"):
        unpacked(archive, tmp_path)
    assert (tmp_path / "outside").read_text() == "kept"


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    """The link comes first in the archive, and is made last."""
    (tmp_path / "outside").mkdir()
    archive = tar(tmp_path / "env.tar.gz", link("lib", "../outside"), member("lib/x", b"written"))
    with pytest.raises(EnvironmentFailed, match="leaves its folder"):
        unpacked(archive, tmp_path)
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_link_that_leaves_through_another_one_is_refused(tmp_path: Path) -> None:
    archive = tar(
        tmp_path / "env.tar.gz",
        member("x", b""),
        member("one/two/y", b""),
        link("one/two/up", "../.."),
        link("far", "one/two/up/.."),
    )
    with pytest.raises(EnvironmentFailed, match="through another one"):
        unpacked(archive, tmp_path)


def test_too_many_bytes_are_refused_while_they_come(tmp_path: Path) -> None:
    archive = tar(tmp_path / "env.tar.gz", member("a", bytes(600_000)), member("b", bytes(600_000)))
    with pytest.raises(EnvironmentFailed, match="it is too large"):
        unpacked(archive, tmp_path)


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "MAX_ENTRIES", 3)
    archive = tar(tmp_path / "env.tar.gz", *(member(str(index)) for index in range(4)))
    with pytest.raises(EnvironmentFailed, match="more than 3 entries"):
        unpacked(archive, tmp_path)


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00 broken", b"PK\x03\x04 broken"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "env.tar.gz").write_bytes(content)
    with pytest.raises(EnvironmentFailed, match="is not an archive that can be read"):
        unpacked(tmp_path / "env.tar.gz", tmp_path)


def test_an_archive_that_was_cut_is_refused(tmp_path: Path) -> None:
    archive = tar(tmp_path / "env.tar.gz", *(member(str(index), os.urandom(5000)) for index in range(20)))
    archive.write_bytes(archive.read_bytes()[:-30_000])
    with pytest.raises(EnvironmentFailed, match="is not an archive that can be read"):
        unpacked(archive, tmp_path)


def test_a_name_that_comes_twice_leaves_other_names_of_the_first_file_alone(tmp_path: Path) -> None:
    archive = tar(
        tmp_path / "env.tar.gz",
        member("a", b"first"),
        member("b", type=tarfile.LNKTYPE, linkname="a"),
        member("a", b"second"),
    )
    folder = unpacked(archive, tmp_path)
    assert ((folder / "a").read_bytes(), (folder / "b").read_bytes()) == (b"second", b"first")


def test_another_name_of_a_link_is_a_link(tmp_path: Path) -> None:
    archive = tar(
        tmp_path / "env.tar.gz",
        member("lib/x", b"content"),
        link("lib/y", "x"),
        member("bin/z", type=tarfile.LNKTYPE, linkname="lib/y"),
    )
    assert (unpacked(archive, tmp_path) / "bin/z").read_bytes() == b"content"

"""The parameters of a load request, and the paths of its files."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kernel.errors import InternalError, InvalidArgument, NoDescriptorLeft
from kernel.repository import override
from kernel.repository.held_folders import remove_abandoned_folders
from kernel.repository.override import (
    MAX_CONFIG_BYTE_SIZE,
    MAX_PATH_DEPTH,
    LoadParameters,
    OverrideFolder,
    UnusableParameters,
    file_paths,
    parse_load_parameters,
)


def test_load_parameters_are_split_in_configuration_and_files() -> None:
    assert parse_load_parameters({}) == LoadParameters()
    assert parse_load_parameters({"config": "{}"}) == LoadParameters("{}")
    assert parse_load_parameters({"config": "{}", "file:1/model.py": b"x", "file:": b""}) == LoadParameters(
        "{}", {"1/model.py": b"x", "": b""}
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"file:a": b""}, "Load parameter 'config' must be specified for model file override"),
        ({"config": "{}", "file:a": "text"}, "File parameter 'file:a' must have bytes type for its value"),
        ({"config": b"{}", "file:a": b""}, "Config parameter 'config' must have string type for its value"),
        ({"config": b"{}"}, "Unrecognized load parameter 'config' with type 'BYTES'"),
        ({"other": "x"}, "Unrecognized load parameter 'other' with type 'STRING'"),
        ({"other": 1}, "Unrecognized load parameter 'other' with type 'INT'"),
        ({"other": True}, "Unrecognized load parameter 'other' with type 'BOOL'"),
    ],
)
def test_wrong_load_parameters_are_refused_with_tritons_text(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableParameters) as caught:
        parse_load_parameters(parameters)
    assert caught.value.message == message


def test_load_parameters_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="^load parameter 'config' has 131073 characters, at most 131072 are"):
        parse_load_parameters({"config": " " * (MAX_CONFIG_BYTE_SIZE + 1)})
    monkeypatch.setattr(override, "MAX_FILES_BYTE_SIZE", 10)
    parse_load_parameters({"config": "{}", "file:a": bytes(5), "file:b": bytes(5)})
    with pytest.raises(InvalidArgument, match="^the files of a load request have 11 bytes, at most 10 are allowed$"):
        parse_load_parameters({"config": "{}", "file:a": bytes(5), "file:b": bytes(6)})


@pytest.mark.parametrize("separator", ["/", "//", "/../b/"])
def test_a_path_of_many_folders_is_refused_before_a_folder_is_made(separator: str) -> None:
    parse_load_parameters({"config": "{}", f"file:{'a/' * MAX_PATH_DEPTH}x": b""})
    with pytest.raises(
        UnusableParameters, match=r"^the path of file parameter 'file:a/.* folders, at most 32 are allowed$"
    ):
        parse_load_parameters({"config": "{}", f"file:{separator.join('a' * (MAX_PATH_DEPTH + 2))}": b""})


@pytest.mark.parametrize("path", ["x" * 1025, "a/" * 100_000 + "x", "é" * 513])
def test_a_long_path_is_refused_and_the_error_is_short(path: str) -> None:
    with pytest.raises(UnusableParameters, match=r" bytes, at most 1024 are allowed$") as caught:
        parse_load_parameters({"config": "{}", f"file:{path}": b""})
    assert len(caught.value.message.encode()) < 1200  # it is for the log, which takes it as it is


def test_paths_of_files_are_normalised_inside_the_folder() -> None:
    names = ["1/model.py", "/1/other.py", "./x/../labels.txt", "1//deep/./er"]
    assert file_paths(names, "/tmp/m") == {
        "1/model.py": "/tmp/m/1/model.py",
        "/1/other.py": "/tmp/m/1/other.py",
        "./x/../labels.txt": "/tmp/m/labels.txt",
        "1//deep/./er": "/tmp/m/1/deep/er",
    }


@pytest.mark.parametrize("name", ["../x", "a/../../x", "..", "", ".", "/", "../m2/x", "a/../../m2/x", "a\0b"])
def test_a_file_that_would_leave_the_folder_is_refused(name: str) -> None:
    with pytest.raises(UnusableParameters, match="^Invalid file parameter 'file:.* must stay within model directory"):
        file_paths([name], "/tmp/m")


def test_a_file_that_is_the_folder_of_another_is_refused() -> None:
    for names in (["1", "1/model.py"], ["1/model.py", "1"]):
        with pytest.raises(UnusableParameters) as caught:
            file_paths(names, "/tmp/m")
        assert caught.value.message == "Invalid file parameter 'file:1/model.py', directory has been created as a file"


def test_the_folder_is_removed_with_its_last_use() -> None:
    folder = OverrideFolder({"1/model.py": b"code", "labels.txt": b"a"})
    root = Path(folder.path)
    assert (root / "1" / "model.py").read_bytes() == b"code"
    assert root.stat().st_mode & 0o077 == 0, "other users can read the folder"
    folder.retain()
    folder.release()
    assert root.is_dir()
    folder.release()
    assert not root.exists()


@pytest.mark.parametrize("name", ["../x", "a" * 300, "1/" + "a" * 300, "a\ud800"])
def test_a_folder_that_cannot_be_filled_is_removed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UnusableParameters):
        OverrideFolder({name: b""})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_files_is_an_error_without_the_folders_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InternalError) as caught:
        OverrideFolder({"a": b"b"})
    assert caught.value.message == "failed to write the files of a load request: No space left on device"
    assert list(tmp_path.iterdir()) == []


# ---- what killed servers leave ------------------------------------------------------------------

#: Makes a folder, writes its path, and waits to be killed.
SERVER = """
import signal
from kernel.repository.override import OverrideFolder
print(OverrideFolder({"1/model.py": b""}).path, flush=True)
signal.pause()
"""


def test_only_folders_of_servers_that_have_ended_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    servers = [
        subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    paths = []
    for server in servers:
        assert server.stdout is not None
        paths.append(server.stdout.readline().strip())
    ours = OverrideFolder({})
    (tmp_path / "naiad-model-file").touch()
    (tmp_path / "naiad-model-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    assert remove_abandoned_folders() == []
    servers[0].kill()
    servers[0].communicate()
    assert remove_abandoned_folders() == [paths[0]]
    assert not Path(paths[0]).exists()
    assert Path(paths[1], "1/model.py").exists()
    servers[1].kill()
    servers[1].communicate()
    assert remove_abandoned_folders() == [paths[1]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [Path(ours.path).name, "naiad-model-file", "naiad-model-link", "other"]
    )
    ours.release()
    assert not Path(ours.path).exists()


def test_folders_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "naiad-model-x").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_abandoned_folders() == []
    assert (tmp_path / "naiad-model-x").is_dir()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flock, calls = fcntl.flock, 0

    def removed_first(fd: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # the server that starts has the lock, and removes the folder
            assert len(remove_abandoned_folders()) == 1
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    folder = OverrideFolder({"a": b""})
    assert Path(folder.path, "a").exists()
    folder.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_removed_before_it_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mkdtemp, made = tempfile.mkdtemp, []

    def removed_at_once(prefix: str, dir: str | None) -> str:
        made.append(mkdtemp(prefix=prefix, dir=dir))
        if len(made) == 1:
            assert remove_abandoned_folders() == made
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_once)
    folder = OverrideFolder({"a": b""})
    assert folder.path == made[1]
    folder.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_locked_for_want_of_a_descriptor_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail(path: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("kernel.repository.override.os.open", fail)
    with pytest.raises(NoDescriptorLeft):
        OverrideFolder({"a": b""})
    assert list(tmp_path.iterdir()) == []

"""Only regular files are opened, and nothing is waited for."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from kernel.regular_files import NotRegular, open_regular, read_regular

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_read_up_to_the_limit_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 100) == b"0123456789"
    assert read_regular(str(tmp_path / "file"), 4) == b"0123"
    with open(open_regular(tmp_path / "file"), "rb") as file:
        assert file.read() == b"0123456789"


@pytest.mark.parametrize("name", ["fifo", "link"])
def test_a_fifo_without_a_writer_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    with pytest.raises(NotRegular, match="it is a FIFO, not a regular file"):
        read_regular(tmp_path / name, 100)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/tty", "/proc/self/status", "/proc/kmsg", "/proc/kcore"])
def test_devices_and_files_of_proc_are_refused(tmp_path: Path, path: str) -> None:
    if not os.path.exists(path):
        pytest.skip(f"there is no {path}")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(NotRegular, match="it is (a device|in /proc), not a regular file"):
        read_regular(tmp_path / "link", 100)


def test_folders_sockets_and_absent_files_have_their_errors(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path, 1)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "absent", 1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        with pytest.raises(NotRegular, match="a socket"):
            read_regular(tmp_path / "s", 1)


def test_a_file_that_becomes_a_fifo_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "fifo")
    unchanged = os.open

    def swapped(path: str, flags: int) -> int:
        return unchanged(tmp_path / "fifo", flags)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(NotRegular, match="a FIFO"):
        open_regular(tmp_path / "file")

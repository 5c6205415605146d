"""Files of traces: what the helper writes."""

from __future__ import annotations

import json
import os
import resource
import stat
from typing import TYPE_CHECKING

import pytest

from kernel.tracing.output.file_task import WriteArguments, check_free, write_traces
from kernel.tracing.trace import TraceRecord

if TYPE_CHECKING:
    from pathlib import Path


def ids(path: Path) -> list[int]:
    return [each["id"] for each in json.loads(path.read_text())]


def record(id: int) -> TraceRecord:
    return TraceRecord(id, 0, "m", 1, "", ["QUEUE_START", id])


def test_traces_are_added_and_the_file_is_json_each_time(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), 0, [record(1), record(2)]))
    assert ids(path) == [1, 2]
    kept = write_traces(WriteArguments(str(path), kept, [record(3)]))
    assert ids(path) == [1, 2, 3]
    assert os.listdir(tmp_path) == ["t"]


def test_the_same_traces_can_be_written_again_because_the_helper_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), 0, [record(1)]))
    for _ in range(2):
        write_traces(WriteArguments(str(path), kept, [record(2)]))
    assert ids(path) == [1, 2]


def test_a_file_of_an_earlier_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("x" * 1000)
    write_traces(WriteArguments(str(path), 0, [record(1)]))
    assert ids(path) == [1]


def disk(free_mib: int, mib: int, free_files: int = 0, files: int = 0) -> os.statvfs_result:
    """Return the figures of a disk with blocks of 1 MiB."""
    return os.statvfs_result((1 << 20, 1 << 20, mib, free_mib, free_mib, files, free_files, free_files, 0, 255))


@pytest.mark.parametrize(
    "found", [disk(1100, 100_000), disk(60, 1000), disk(2000, 100_000, 10_001, 10**6), disk(60, 1000, 6, 100)]
)
def test_traces_are_written_while_the_disk_has_enough_for_others(found: os.statvfs_result) -> None:
    check_free(found, 1 << 20)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (disk(1024, 100_000), "its disk has 1024 MiB free, and traces leave at least 1024 MiB to other programs"),
        (disk(50, 1000), "its disk has 50 MiB free, and traces leave at least 50 MiB to other programs"),
        (disk(2000, 10_000, 9999, 10**6), "its disk has room for 9999 files, and traces leave at least 10000 to other"),
    ],
)
def test_traces_do_not_take_the_last_of_the_disk(found: os.statvfs_result, text: str) -> None:
    with pytest.raises(OSError, match=text):
        check_free(found, 1 << 20)


def test_a_file_that_was_moved_or_cut_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), 0, [record(1)]))
    path.unlink()
    kept = write_traces(WriteArguments(str(path), kept, [record(2)]))
    assert ids(path) == [2]
    path.write_text("")
    write_traces(WriteArguments(str(path), kept, [record(3)]))
    assert ids(path) == [3]


def test_a_reader_that_has_opened_the_file_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), 0, [record(1)]))
    with path.open() as opened:
        write_traces(WriteArguments(str(path), kept, [record(2)]))
        assert [each["id"] for each in json.loads(opened.read())] == [1]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_traces(WriteArguments(str(link), 0, [record(1)]))
    assert link.is_symlink()
    assert ids(target) == [1]


def test_what_is_no_file_is_not_replaced() -> None:
    before = os.stat("/dev/null").st_mode
    with pytest.raises(ValueError, match="^it is not a file$"):
        write_traces(WriteArguments("/dev/null", 0, [record(1)]))
    assert stat.S_ISCHR(before)
    assert os.stat("/dev/null").st_mode == before


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_traces(WriteArguments(str(tmp_path / "no" / "t"), 0, [record(1)]))


def test_a_full_disk_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), 0, [record(1)]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kept + 3, limits[1]))  # the system then refuses as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            write_traces(WriteArguments(str(path), kept, [record(2)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ids(path) == [1]
    assert os.listdir(tmp_path) == ["t"]

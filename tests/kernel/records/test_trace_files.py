"""Files of traces: what the helper writes.

In which file each trace is written.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import stat
from typing import TYPE_CHECKING

import pytest

from kernel.records.trace import QUEUE_INPUT, TracedTensor, TraceRecord
from kernel.records.trace_files import FileChoice, KeptPart, TraceFiles, WriteArguments, check_free, write_traces
from kernel.settings import TraceValues

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def ids(path: Path) -> list[int]:
    return [each["id"] for each in json.loads(path.read_text())]


def record(id: int) -> TraceRecord:
    return TraceRecord(id, 0, "m", 1, "", ["QUEUE_START", id])


def test_traces_are_added_and_the_file_is_json_each_time(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), KeptPart(), [record(1), record(2)]))
    assert ids(path) == [1, 2]
    kept = write_traces(WriteArguments(str(path), kept, [record(3)]))
    assert ids(path) == [1, 2, 3]
    assert os.listdir(tmp_path) == ["t"]


def test_the_same_traces_can_be_written_again_because_the_helper_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
    for _ in range(2):
        write_traces(WriteArguments(str(path), kept, [record(2)]))
    assert ids(path) == [1, 2]


def test_a_file_of_an_earlier_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("x" * 1000)
    write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
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
        (disk(1024, 100_000), "its disk has 1024 MiB free, too few for 1 MiB more: traces leave 1024 MiB to others"),
        (disk(50, 1000), "its disk has 50 MiB free, too few for 1 MiB more: traces leave 50 MiB to others"),
        (disk(2000, 10_000, 9999, 10**6), "its disk has room for 9999 files, and traces leave at least 10000 to other"),
    ],
)
def test_traces_do_not_take_the_last_of_the_disk(found: os.statvfs_result, text: str) -> None:
    with pytest.raises(OSError, match=text):
        check_free(found, 1 << 20)


def test_a_file_that_was_moved_or_cut_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
    path.unlink()
    kept = write_traces(WriteArguments(str(path), kept, [record(2)]))
    assert ids(path) == [2]
    path.write_text("")
    write_traces(WriteArguments(str(path), kept, [record(3)]))
    assert ids(path) == [3]


def test_a_reader_that_has_opened_the_file_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
    with path.open() as opened:
        write_traces(WriteArguments(str(path), kept, [record(2)]))
        assert [each["id"] for each in json.loads(opened.read())] == [1]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_traces(WriteArguments(str(link), KeptPart(), [record(1)]))
    assert link.is_symlink()
    assert ids(target) == [1]


def test_what_is_no_file_is_not_replaced() -> None:
    before = os.stat("/dev/null").st_mode
    with pytest.raises(ValueError, match="^it is not a file$"):
        write_traces(WriteArguments("/dev/null", KeptPart(), [record(1)]))
    assert stat.S_ISCHR(before)
    assert os.stat("/dev/null").st_mode == before


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_traces(WriteArguments(str(tmp_path / "no" / "t"), KeptPart(), [record(1)]))


def test_a_full_disk_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (kept.byte_size + 3, limits[1])
    )  # the system then refuses as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            write_traces(WriteArguments(str(path), kept, [record(2)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ids(path) == [1]
    assert os.listdir(tmp_path) == ["t"]


def with_tensors(id: int) -> TraceRecord:
    tensor = TracedTensor(QUEUE_INPUT, "IN", "INT8", [1], b"\1", 1)
    return TraceRecord(id, 0, "m", 1, "", ["QUEUE_START", id], [tensor])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_usual_umask")
def test_others_may_read_times_and_nobody_else_tensors(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
    assert mode(path) == 0o644
    kept = write_traces(WriteArguments(str(path), kept, [with_tensors(2)]))
    assert mode(path) == 0o600
    write_traces(WriteArguments(str(path), kept, [record(3)]))
    assert mode(path) == 0o600, "the tensors are still in it"
    write_traces(WriteArguments(str(path), KeptPart(), [record(4)]))
    assert mode(path) == 0o644, "a new file"


def test_a_mode_that_the_operator_gives_a_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
    path.chmod(0o640)
    write_traces(WriteArguments(str(path), kept, [record(2)]))
    assert mode(path) == 0o640


def test_a_file_that_another_server_has_replaced_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
    theirs = write_traces(WriteArguments(str(path), KeptPart(), [record(21), record(22), record(23)]))
    for part in (kept, KeptPart(theirs.byte_size + 100, kept.end)):
        with pytest.raises(ValueError, match="^another program writes it, too; each server needs a file of its own$"):
            write_traces(WriteArguments(str(path), part, [record(2)]))
    assert ids(path) == [21, 22, 23]


def test_two_servers_do_not_write_a_file_at_the_same_time(tmp_path: Path) -> None:
    path, part = tmp_path / "t", tmp_path / "t.part"
    with part.open("w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="^another server writes it at the same time; each needs a file of its"):
            write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
        assert part.stat().st_ino == os.fstat(theirs.fileno()).st_ino


def test_what_a_killed_helper_has_left_is_replaced_and_not_written_to(tmp_path: Path) -> None:
    path, part = tmp_path / "t", tmp_path / "t.part"
    with part.open("w+") as left:
        write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
        assert left.read() == ""
    assert (ids(path), os.listdir(tmp_path)) == ([1], ["t"])


def test_a_link_in_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    path, part, other = tmp_path / "t", tmp_path / "t.part", tmp_path / "other"
    other.write_text("precious")
    part.symlink_to(other)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_traces(WriteArguments(str(path), KeptPart(), [record(1)]))
    assert other.read_text() == "precious"


def choice(files: TraceFiles, **settings: int) -> FileChoice:
    return FileChoice(TraceValues(("TIMESTAMPS",), **settings), "/t", files)  # type: ignore[arg-type]


def paths(choice: FileChoice, *parents: int) -> list[str]:
    """Return the files of traces with these parents, as the output of a writer chooses them."""
    found: list[str] = []
    for parent in parents:
        path = found[-1] if choice.room else choice.next_file().path
        choice.room -= not parent
        found.append(path)
    return found


def test_all_traces_share_one_file_without_a_log_frequency() -> None:
    files = TraceFiles()
    first, second = choice(files), choice(files)
    assert paths(first, 0, 0) == ["/t", "/t"]
    assert first.next_file() is second.next_file(), "also with other settings"


def test_a_log_frequency_gives_each_number_of_traces_a_file_and_children_do_not_count() -> None:
    assert paths(choice(TraceFiles(), log_frequency=2), 0, 1, 1, 0, 2, 0, 0, 0) == [
        "/t.0", "/t.0", "/t.0", "/t.0", "/t.1", "/t.1", "/t.1", "/t.2",
    ]  # fmt: skip


def test_traces_that_are_limited_in_number_have_a_file_with_an_index() -> None:
    assert paths(choice(TraceFiles(), trace_count=5), 0, 0) == ["/t.0", "/t.0"]


def test_indexes_go_on_when_settings_change() -> None:
    files = TraceFiles()
    assert paths(choice(files, log_frequency=1), 0, 0) == ["/t.0", "/t.1"]
    assert paths(choice(files, log_frequency=5), 0) == ["/t.2"]

"""Only the thread of the log waits for the reader of the log. What is lost is counted and reported.

The queue of the log is limited in lines and bytes, and says where lines are missing.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest

from kernel.observe.log_writer import PORTION_BYTE_SIZE, FileTarget, LineQueue, LogWriter, StreamTarget
from kernel.settings import LogSettings
from tests.kernel.observe.conftest import FLUSH_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kernel.observe.conftest import LogOutput

logger = logging.getLogger("naiad.test")


def loss_line(count: int) -> bytes:
    return b"lost %d\n" % count


class HeldTarget:
    """A target that nobody reads before `read` is set. It then takes `room` bytes of each write."""

    def __init__(self) -> None:
        self.read = threading.Event()
        self.waiting = threading.Event()
        self.written = b""
        self.room = 1 << 30

    def write(self, lines: bytes) -> int:
        self.waiting.set()
        assert self.read.wait(FLUSH_TIMEOUT_S)
        self.written += lines[: self.room]
        return min(self.room, len(lines))


@pytest.fixture
def target() -> Iterator[HeldTarget]:
    made = HeldTarget()
    yield made
    made.read.set()


def test_lines_that_find_the_queue_full_are_dropped_and_reported_where_they_would_stand(target: HeldTarget) -> None:
    writer = LogWriter(target, loss_line, LineQueue(max_lines=2))
    writer.put(b"a\n")
    assert target.waiting.wait(FLUSH_TIMEOUT_S)
    for line in (b"b\n", b"c\n", b"d\n", b"e\n"):
        writer.put(line)
    assert writer.full
    assert writer.lost_line_count == 2
    assert not writer.flush(0)
    target.read.set()
    assert writer.flush(FLUSH_TIMEOUT_S)
    writer.put(b"f\n")
    assert writer.flush(FLUSH_TIMEOUT_S)
    assert target.written == b"a\nb\nc\nlost 2\nf\n"
    writer.close(FLUSH_TIMEOUT_S)


def test_lines_that_cannot_be_written_are_reported_with_the_next_line(target: HeldTarget) -> None:
    target.read.set()
    target.room = 3
    writer = LogWriter(target, loss_line)
    writer.put(b"a\n")
    assert writer.flush(FLUSH_TIMEOUT_S)
    target.room = 0
    writer.put(b"b\n")
    assert writer.flush(FLUSH_TIMEOUT_S)
    writer.put(b"c\n")
    assert writer.flush(FLUSH_TIMEOUT_S)
    target.room = 1 << 30
    writer.put(b"d\n")
    assert writer.flush(FLUSH_TIMEOUT_S)
    assert target.written == b"a\nlost 2\nd\n"
    assert writer.lost_line_count == 2
    writer.close(FLUSH_TIMEOUT_S)


def test_closing_does_not_wait_longer_than_it_may_and_later_lines_are_lost(target: HeldTarget) -> None:
    writer = LogWriter(target, loss_line)
    writer.put(b"a\n")
    writer.close(0.001)
    writer.put(b"b\n")
    assert writer.lost_line_count == 1
    target.read.set()
    writer.thread.join(FLUSH_TIMEOUT_S)
    assert not writer.thread.is_alive()
    assert target.written == b"a\nlost 1\n"


def test_a_log_file_that_was_moved_away_or_removed_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    target = FileTarget(str(path), look_s=0)
    target.write(b"one\n")
    path.rename(tmp_path / "log.1")
    target.write(b"two\n")
    target.write(b"three\n")
    assert (tmp_path / "log.1").read_bytes() == b"one\n"
    assert path.read_bytes() == b"two\nthree\n"
    path.unlink()
    assert target.write(b"four\n") == 5
    assert path.read_bytes() == b"four\n"


def test_where_no_new_log_file_can_be_made_the_old_one_is_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    target = FileTarget(str(folder / "log"), look_s=0)
    folder.rename(tmp_path / "moved")
    assert target.write(b"one\n") == 4
    assert (tmp_path / "moved" / "log").read_bytes() == b"one\n"


def test_a_full_disk_is_named_once_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    target = FileTarget("/dev/full")
    assert [target.write(b"one\n"), target.write(b"two\n")] == [0, 0]
    assert capfd.readouterr().err == "the log file '/dev/full' cannot be written: No space left on device\n"


def test_all_of_a_large_text_goes_through_a_pipe_that_does_not_block() -> None:
    reader, fd = os.pipe()
    os.set_blocking(fd, False)
    text = b"x" * 300_000 + b"\n"
    writer = LogWriter(StreamTarget(fd), loss_line)
    writer.put(text)
    found = b""
    while len(found) < len(text):
        found += os.read(reader, 65536)
    assert found == text
    assert writer.flush(FLUSH_TIMEOUT_S)
    os.close(reader)
    writer.put(b"nobody can read this\n")
    assert writer.flush(FLUSH_TIMEOUT_S)
    assert writer.lost_line_count == 1
    writer.close(FLUSH_TIMEOUT_S)
    os.close(fd)


def test_code_that_logs_never_waits_for_the_reader_of_a_full_pipe(
    output: LogOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, fd = os.pipe()
    with os.fdopen(fd, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        output.set_up(LogSettings())
        for number in range(1000):
            logger.info("%d %s", number, "x" * 1000)  # the pipe holds 64 KiB
        assert not output.log.flush(0.001)
        found = b""
        while b'"999 ' not in found:
            found += os.read(reader, 65536)
        output.flush()
        assert output.log.lost_line_count == 0
    os.close(reader)


def test_a_log_call_with_wrong_arguments_is_a_line_of_the_log(output: LogOutput) -> None:
    output.set_up(LogSettings())
    logger.info("%d", "no number")
    captured = output.read()
    assert "a line of the log could not be formatted: TypeError" in captured.out
    assert captured.err == ""


def test_a_status_stays_below_the_lines_until_it_is_taken_away() -> None:
    target = HeldTarget()
    target.read.set()
    writer = LogWriter(target, loss_line)

    def written() -> bytes:
        assert writer.flush(FLUSH_TIMEOUT_S)
        found, target.written = target.written, b""
        return found

    writer.put(b"before\n")
    assert written() == b"before\n"
    writer.show_status(b"loading")
    assert written() == b"\x1b[2Kloading\r"
    writer.put(b"line\n")
    assert written() == b"\x1b[2Kline\nloading\r"
    writer.show_status(b"")
    assert written() == b"\x1b[2K"
    writer.put(b"after\n")
    assert written() == b"after\n"
    writer.close(FLUSH_TIMEOUT_S)


def test_a_status_is_no_part_of_what_is_lost() -> None:
    target = HeldTarget()
    target.read.set()
    writer = LogWriter(target, loss_line)
    writer.show_status(b"loading")
    assert writer.flush(FLUSH_TIMEOUT_S)
    target.room = len(b"\x1b[2K") + len(b"first\n")
    writer.put(b"first\n")
    assert writer.flush(FLUSH_TIMEOUT_S)
    assert writer.lost_line_count == 0
    writer.close(FLUSH_TIMEOUT_S)


def test_lines_leave_in_their_order() -> None:
    queue = LineQueue()
    queue.put(b"a\n")
    queue.put(b"b\n")
    assert queue
    assert queue.take() == [b"a\n", b"b\n"]
    assert not queue


def test_a_queue_is_full_at_its_number_of_lines_or_of_bytes() -> None:
    lines = LineQueue(max_lines=2)
    lines.put(b"a\n")
    assert not lines.full
    lines.put(b"b\n")
    assert lines.full
    bytes_ = LineQueue(max_byte_size=10)
    bytes_.put(b"123456789")
    assert not bytes_.full
    bytes_.put(b"1")
    assert bytes_.full
    for queue in (lines, bytes_):
        queue.take()
        assert not queue.full


def test_dropped_lines_are_counted_where_they_would_stand() -> None:
    queue = LineQueue(max_lines=1)
    queue.put(b"a\n")
    queue.drop()
    queue.drop()
    assert queue.take() == [b"a\n", 2]
    queue.drop()
    queue.put(b"b\n")
    assert queue.take() == [1, b"b\n"]


def test_a_portion_is_taken_at_a_time() -> None:
    queue = LineQueue()
    line = b"x" * (PORTION_BYTE_SIZE // 2)
    for _ in range(3):
        queue.put(line)
    assert queue.take() == [line, line]
    assert queue.take() == [line]

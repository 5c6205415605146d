"""The queue of the log is limited in lines and bytes, and says where lines are missing."""

from __future__ import annotations

from kernel.observe.line_queue import PORTION_BYTE_SIZE, LineQueue


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

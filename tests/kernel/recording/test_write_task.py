"""The helper's side: records become segments."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.recording.format import RecordedTensor, ResponseRecord, SegmentReader, decode_record, frame
from kernel.recording.passed import PassedRequest, PassedResponse, PassedTensor, TensorRules
from kernel.recording.ring import RingPosition, segment_byte_size, segment_name
from kernel.recording.write_task import (
    RecordArguments,
    RecordResult,
    decode_result,
    encode_arguments,
    write_frames,
    write_records_task,
)

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 1 << 20


def wanted(folder: Path, position: RingPosition | None = None) -> RecordArguments:
    rules = TensorRules(LIMIT, False, False)
    return RecordArguments(str(folder), "run", LIMIT, position or RingPosition(1), rules, [])


def contents(folder: Path, number: int = 1) -> list[bytes]:
    reader = SegmentReader(memoryview((folder / segment_name(number)).read_bytes()), "s")
    return [bytes(content) for _, content in reader.contents()]


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_records_are_added_to_the_segment(tmp_path: Path) -> None:
    first = write_frames(wanted(tmp_path), [frame(b"a")])
    second = write_frames(wanted(tmp_path, first.position), [frame(b"b"), frame(b"c")])
    assert contents(tmp_path) == [b"a", b"b", b"c"]
    assert second == RecordResult(RingPosition(1, total(tmp_path)))


def test_only_the_owner_may_read_a_segment(tmp_path: Path) -> None:
    write_frames(wanted(tmp_path), [frame(b"a")])
    assert (tmp_path / segment_name(1)).stat().st_mode & 0o777 == 0o600


def test_what_an_interrupted_write_left_is_written_over(tmp_path: Path) -> None:
    first = write_frames(wanted(tmp_path), [frame(b"a")])
    with (tmp_path / segment_name(1)).open("ab") as file:
        file.write(frame(b"cut" * 50)[:-1])
    assert contents(tmp_path) == [b"a"]
    write_frames(wanted(tmp_path, first.position), [frame(b"b")])
    assert contents(tmp_path) == [b"a", b"b"]


def test_all_segments_together_stay_below_the_limit_and_the_newest_records_are_kept(tmp_path: Path) -> None:
    position = RingPosition(1)
    for number in range(300):
        result = write_frames(wanted(tmp_path, position), [frame(b"%06d" % number * 1000)])
        position = result.position
        assert result == RecordResult(position)
        assert total(tmp_path) <= LIMIT
    assert total(tmp_path) > LIMIT - 2 * segment_byte_size(LIMIT)
    found = [content[:6] for path in sorted(tmp_path.iterdir())
             for _, content in SegmentReader(memoryview(path.read_bytes()), "s").contents()]  # fmt: skip
    assert found == [b"%06d" % number for number in range(300 - len(found), 300)]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"x" * LIMIT)
    assert write_frames(wanted(tmp_path), [frame(b"a")]).error == ""
    assert (tmp_path / "notes").exists()


def test_a_record_larger_than_half_of_the_recording_is_lost_alone(tmp_path: Path) -> None:
    result = write_frames(wanted(tmp_path), [frame(b"a"), frame(b"x" * LIMIT), frame(b"b")])
    assert (result.lost, result.error) == (1, "")
    assert contents(tmp_path) == [b"a", b"b"]


def test_a_record_larger_than_a_segment_has_one_of_its_own(tmp_path: Path) -> None:
    large = b"x" * (LIMIT // 4)
    write_frames(wanted(tmp_path), [frame(b"a"), frame(large), frame(b"b")])
    assert [contents(tmp_path, number) for number in (1, 2, 3)] == [[b"a"], [large], [b"b"]]


def test_a_full_disk_leaves_the_segment_as_it_was(tmp_path: Path) -> None:
    first = write_frames(wanted(tmp_path), [frame(b"a")])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (first.position.byte_size + 3, limits[1]))  # refuses as a full disk
    try:
        result = write_frames(wanted(tmp_path, first.position), [frame(b"b"), frame(b"c")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result == RecordResult(first.position, 2, os.strerror(27))
    assert contents(tmp_path) == [b"a"]
    assert total(tmp_path) == first.position.byte_size


def test_a_full_disk_leaves_no_new_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    result = write_frames(wanted(tmp_path), [frame(b"a")])
    assert result == RecordResult(RingPosition(1), 1, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_removed_folder_is_an_error_and_a_removed_segment_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    first = write_frames(wanted(folder), [frame(b"a")])
    (folder / segment_name(1)).unlink()
    second = write_frames(wanted(folder, first.position), [frame(b"b")])
    assert (second.position.number, contents(folder, 2)) == (2, [b"b"])
    (folder / segment_name(2)).unlink()
    folder.rmdir()
    assert write_frames(wanted(folder, second.position), [frame(b"c")]).error == "No such file or directory"


def test_the_records_of_messages_are_written(tmp_path: Path) -> None:
    passed: list[PassedRequest | PassedResponse] = [
        PassedResponse(1, 1, True, "", None, None, "", "", 0),
        PassedResponse(2, 2, True, "1", [PassedTensor("b", "UINT8", [4], source=0)], None, "", "", 0, first_source=1),
    ]
    arguments = msgspec.structs.replace(wanted(tmp_path), passed=passed)
    steps = write_records_task(encode_arguments(arguments), [memoryview(b"other"), memoryview(b"bbbb")])
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert decode_result(stop.value.value.message).error == ""
    assert [decode_record(content) for content in contents(tmp_path)] == [
        ResponseRecord(1, 1, True),
        ResponseRecord(2, 2, True, "1", [RecordedTensor("b", "UINT8", [4], 4, data=b"bbbb")]),
    ]

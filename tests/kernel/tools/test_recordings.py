"""The index of a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.records.recording_format import (
    BadRecording,
    ResponseRecord,
    encode_record,
    frame,
    segment_name,
)
from kernel.tools.recordings import RecordingIndex
from tests.kernel.tools.recorded_files import request, write

if TYPE_CHECKING:
    from pathlib import Path


def response(number: int, at_ns: int = 0, final: bool = True) -> ResponseRecord:
    return ResponseRecord(number, at_ns, final)


def test_requests_have_their_responses_also_from_later_segments(tmp_path: Path) -> None:
    write(tmp_path, 1, request(1), request(2), response(2, final=False))
    write(tmp_path, 2, response(1), response(2))
    index = RecordingIndex(tmp_path)
    assert [(len(each.responses), each.complete) for each in index.exchanges] == [(1, True), (2, True)]
    loaded, responses = index.load(index.exchanges[1])
    assert (loaded, responses) == (request(2), [response(2, final=False), response(2)])


def test_exchanges_are_in_the_order_of_time_also_of_several_runs(tmp_path: Path) -> None:
    write(tmp_path, 1, request(1, 50, id="second"), request(2, 10, id="first"), wall_ns=1000)
    write(tmp_path, 2, request(1, 7, id="third"), response(1), run="b", wall_ns=2000)
    index = RecordingIndex(tmp_path)
    assert [index.load(each)[0].id for each in index.exchanges] == ["first", "second", "third"]
    assert [each.at_ns for each in index.exchanges] == [1010, 1050, 2007]
    assert [each.complete for each in index.exchanges] == [False, False, True]


def test_responses_whose_requests_were_removed_are_counted(tmp_path: Path) -> None:
    write(tmp_path, 5, response(1), response(2), request(3), response(3))
    index = RecordingIndex(tmp_path)
    assert (index.orphan_count, len(index.exchanges)) == (2, 1)


def test_only_requests_to_the_wanted_models_count(tmp_path: Path) -> None:
    write(tmp_path, 1, request(1, model="a"), request(2, model="b"), response(2), response(1))
    index = RecordingIndex(tmp_path, {"a"})
    assert ([each.model for each in index.exchanges], index.orphan_count) == (["a"], 0)


def test_a_cut_record_is_skipped_and_its_bytes_are_counted(tmp_path: Path) -> None:
    write(tmp_path, 1, request(1), response(1), cut=3)
    write(tmp_path, 2, request(2), response(2), run="b")
    index = RecordingIndex(tmp_path)
    assert [each.complete for each in index.exchanges] == [False, True]
    (cut,) = index.cuts
    assert f"no complete record in its last {len(frame(encode_record(response(1)))) - 3} bytes" in cut


def test_a_segment_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / segment_name(1)).write_bytes(b"")
    write(tmp_path, 2, request(2), response(2))
    index = RecordingIndex(tmp_path)
    assert len(index.exchanges) == 1
    assert index.problems == [f"'{tmp_path / segment_name(1)}' has no header: it is empty, or cut"]


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match="there is no recording in"):
        RecordingIndex(tmp_path)
    with pytest.raises(BadRecording, match="cannot be read: No such file or directory"):
        RecordingIndex(tmp_path / "no")
    (tmp_path / segment_name(1)).write_bytes(b"something else, long enough")
    with pytest.raises(BadRecording, match="is not a recording"):
        RecordingIndex(tmp_path)


def test_a_segment_that_was_removed_meanwhile_is_an_error_of_its_requests(tmp_path: Path) -> None:
    path = write(tmp_path, 1, request(1), response(1))
    index = RecordingIndex(tmp_path)
    path.unlink()
    with pytest.raises(BadRecording, match="cannot be read any more"):
        index.load(index.exchanges[0])

"""The helper's side: records become segments.

What the helper makes of the messages of the kernel.
"""

from __future__ import annotations

import hashlib
import os
import resource
from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.records.record_task import (
    TOO_LARGE,
    PassedOutput,
    PassedRequest,
    PassedResponse,
    PassedTensor,
    RecordArguments,
    RecordResult,
    TensorRules,
    decode_result,
    encode_arguments,
    record_of,
    write_frames,
    write_records_task,
)
from kernel.records.recording_format import (
    RecordedOutput,
    RecordedTensor,
    RequestRecord,
    ResponseRecord,
    RingPosition,
    SegmentReader,
    decode_record,
    frame,
    segment_byte_size,
    segment_name,
)
from shm.tensor import ClientSpan, RequestedOutput, Tensor

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


BY_VALUE = TensorRules(limit=4, input_digests=False, output_digests=False)

BY_DIGEST = TensorRules(limit=4, input_digests=True, output_digests=True)

TENSORS = [
    PassedTensor("inline", "UINT8", [3], b"abc"),
    PassedTensor("source", "UINT8", [4], source=1),
    PassedTensor("large", "UINT8", [5], source=0),
    PassedTensor("region", "UINT8", [6], region=ClientSpan("r", 6, 8), byte_size=6),
    PassedTensor("missing", "UINT8", [9], byte_size=9, missing="no memory"),
    PassedTensor("empty", "UINT8", [0], b""),
]

#: Those of another message stand before.
SOURCES = [memoryview(b"other"), memoryview(b"12345"), memoryview(b"wxyz")]

REGION = RecordedTensor("region", "UINT8", [6], 6, region="r", offset=8)

MISSING = RecordedTensor("missing", "UINT8", [9], 9, missing="no memory")

EMPTY = RecordedTensor("empty", "UINT8", [0], 0)

INLINE = RecordedTensor("inline", "UINT8", [3], 3, data=b"abc")

SOURCE = RecordedTensor("source", "UINT8", [4], 4, data=b"wxyz")

LARGE = RecordedTensor("large", "UINT8", [5], 5, sha256=hashlib.sha256(b"12345").digest())

DIGESTS = [
    RecordedTensor("inline", "UINT8", [3], 3, sha256=hashlib.sha256(b"abc").digest()),
    RecordedTensor("source", "UINT8", [4], 4, sha256=hashlib.sha256(b"wxyz").digest()),
    LARGE, REGION, MISSING, EMPTY,
]  # fmt: skip


def request(inputs: list[PassedTensor]) -> PassedRequest:
    return PassedRequest(
        7, 8, "m", 2, inputs, "2", "id", [PassedOutput("o", 3, None, ClientSpan("r", 2, 1))], {"p": 1}, 5, True, True,
        True, 9, 10, True, "grpc", 1,
    )  # fmt: skip


@pytest.mark.parametrize(("rules", "expected"), [
    (BY_VALUE, [INLINE, SOURCE, RecordedTensor("large", "UINT8", [5], 5, missing=TOO_LARGE), REGION, MISSING, EMPTY]),
    (BY_DIGEST, DIGESTS),
])  # fmt: skip
def test_inputs_are_recorded_by_value_or_digest_and_large_values_are_left_out(
    rules: TensorRules, expected: list[RecordedTensor]
) -> None:
    assert record_of(request(TENSORS), SOURCES, rules) == RequestRecord(
        7, 8, "m", 2, expected, "2", "id", [RecordedOutput("o", 3, "r", 1, 2)], {"p": 1}, 5, True, True, True, 9, 10,
        True, "grpc",
    )  # fmt: skip


@pytest.mark.parametrize(("rules", "expected"), [
    (BY_VALUE, [INLINE, SOURCE, LARGE, REGION, MISSING, EMPTY]),
    (BY_DIGEST, DIGESTS),
])  # fmt: skip
def test_outputs_that_are_large_are_recorded_by_their_digest(
    rules: TensorRules, expected: list[RecordedTensor]
) -> None:
    passed = PassedResponse(7, 9, True, "2", TENSORS, {"p": 2}, "", "", 8, 1)
    assert record_of(passed, SOURCES, rules) == ResponseRecord(7, 9, True, "2", expected, {"p": 2}, queued_ns=8)


def test_an_error_and_the_mark_of_an_end_have_no_outputs() -> None:
    failed = PassedResponse(7, 9, True, "2", None, None, "wrong", "internal", 0)
    assert record_of(failed, [], BY_VALUE) == ResponseRecord(7, 9, True, "2", None, {}, "wrong", "internal")
    last = PassedResponse(7, 9, True, "2", None, None, "", "", 0)
    assert record_of(last, [], BY_VALUE) == ResponseRecord(7, 9, True, "2")


@pytest.mark.parametrize(("given", "kind", "expected"), [
    (Tensor("a", "UINT8", [2], b"ab"), PassedTensor, PassedTensor("a", "UINT8", [2], b"ab")),
    (Tensor("a", "UINT8", [2], memoryview(b"ab")), PassedTensor, PassedTensor("a", "UINT8", [2], b"ab")),
    (Tensor("a", "UINT8", [2], None, None, ClientSpan("r", 2, 1)), PassedTensor,
     PassedTensor("a", "UINT8", [2], region=ClientSpan("r", 2, 1))),
    (RequestedOutput("o"), PassedOutput, PassedOutput("o")),
    (RequestedOutput("o", 3, None, ClientSpan("r", 2, 1), ["label"], True), PassedOutput,
     PassedOutput("o", 3, None, ClientSpan("r", 2, 1))),
])  # fmt: skip
def test_tensors_and_outputs_of_requests_are_passed_as_they_are(
    given: object, kind: type[object], expected: object
) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=kind) == expected

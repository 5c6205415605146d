"""The queue of records before the helper that writes them."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest

from kernel.errors import Unavailable
from kernel.records import record_writer as module
from kernel.records.record_settings import RecordSettings
from kernel.records.record_task import RESPONSE, PassedTensor
from kernel.records.record_writer import RecordWriter
from kernel.records.recording_format import (
    Recorded,
    ResponseRecord,
    RingPosition,
    SegmentReader,
    decode_record,
    segment_name,
)
from shm.arena import Arena
from shm.tensor import Tensor
from tests.protocols.front_door_lab import DirectHelpers, LateHelpers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.serving.helper_tasks import HelperTask

pytestmark = pytest.mark.anyio


def response(
    number: int, outputs: Sequence[PassedTensor | Tensor] | None = None, error: str = ""
) -> tuple[object, ...]:
    """Return a message."""
    return (RESPONSE, number, 0, True, "1", outputs, None, error, "", 0)


class RefusingHelpers(DirectHelpers):
    def add(self, task: HelperTask) -> None:
        task.failed(Unavailable("the helper process was lost (exit code 1)"))


class WriterBench:
    def __init__(self, folder: Path, helpers: DirectHelpers) -> None:
        self.folder = folder
        self.stops = 0
        self.writer = RecordWriter(
            helpers, str(folder), "run", RecordSettings(folder, 1 << 20), RingPosition(1), self._stop
        )

    def _stop(self) -> None:
        self.stops += 1

    def put(self, *numbers: int) -> list[bool]:
        return [self.writer.put(response(number)) for number in numbers]

    @property
    def counts(self) -> tuple[int, int]:
        return self.writer.written_count, self.writer.lost_count

    def records(self) -> list[Recorded]:
        reader = SegmentReader(memoryview((self.folder / segment_name(1)).read_bytes()), "s")
        return [decode_record(content) for _, content in reader.contents()]

    def numbers(self) -> list[int]:
        return [record.number for record in self.records()]


async def test_what_waits_is_written_when_the_server_stops(tmp_path: Path) -> None:
    bench = WriterBench(tmp_path, DirectHelpers())
    assert bench.put(1, 2) == [True, True]
    assert list(tmp_path.iterdir()) == []
    await bench.writer.close(5)
    assert (bench.numbers(), bench.counts) == ([1, 2], (2, 0))


async def test_a_full_batch_is_written_at_once_and_nothing_after_the_end(tmp_path: Path) -> None:
    bench = WriterBench(tmp_path, DirectHelpers())
    bench.put(*range(512))
    assert len(bench.numbers()) == 512
    await bench.writer.close(5)
    assert bench.put(513) == [False]


async def test_records_beyond_the_limit_are_lost_counted_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    monkeypatch.setattr(module, "BATCH_LENGTH", 1)
    helpers = LateHelpers()
    bench = WriterBench(tmp_path, helpers)
    with caplog.at_level(logging.WARNING):
        assert bench.put(1, 2, 3, 4) == [True, True, False, False]
    assert bench.counts == (0, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "1 record of the recorder was lost: too many records wait to be written"
    ]
    caplog.clear()
    await bench.writer.close(0)
    assert [record.getMessage() for record in caplog.records] == [
        "1 record of the recorder was lost: the server ends before they are written",
        "1 record of the recorder was lost: too many records wait to be written",
    ]
    helpers.run_all()
    assert bench.counts == (1, 3), "the server did not wait for the second one"


async def test_bytes_that_the_helper_has_count_until_it_has_written_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTE_SIZE", 1000)
    monkeypatch.setattr(module, "BATCH_BYTE_SIZE", 1)
    helpers = LateHelpers()
    bench = WriterBench(tmp_path, helpers)
    assert bench.writer.put(response(1, [Tensor("a", "UINT8", [2000], bytes(2000))]))
    assert bench.put(2) == [False]
    helpers.run_all()
    assert bench.put(3) == [True]
    helpers.run_all()
    assert bench.numbers() == [1, 3]


async def test_sources_are_read_and_released(tmp_path: Path) -> None:
    with Arena("a", 1 << 20) as arena:
        block = arena.take(8192)
        assert block is not None
        block.view()[:] = b"x" * 8192
        bench = WriterBench(tmp_path, DirectHelpers())
        message = response(1, [PassedTensor("a", "UINT8", [8192], source=0)])
        assert bench.writer.put(message, [Tensor("a", "UINT8", [8192], None, block.span)])
        assert arena.allocator.used_bytes
        await bench.writer.close(5)
        assert not arena.allocator.used_bytes
    (found,) = bench.records()
    assert isinstance(found, ResponseRecord)
    assert found.outputs is not None
    assert found.outputs[0].data == b"x" * 8192


async def test_a_lost_helper_loses_its_records_and_no_memory(tmp_path: Path) -> None:
    with Arena("a", 1 << 20) as arena:
        block = arena.take(8192)
        assert block is not None
        bench = WriterBench(tmp_path, RefusingHelpers())
        message = response(1, [PassedTensor("a", "UINT8", [8192], source=0)])
        bench.writer.put(message, [Tensor("a", "UINT8", [8192], None, block.span)])
        await bench.writer.close(5)
        assert not arena.allocator.used_bytes
    assert (bench.counts, bench.stops) == ((0, 1), 0)


async def test_a_full_disk_stops_the_recording_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    helpers = LateHelpers()
    bench = WriterBench(tmp_path, helpers)
    bench.put(*range(600))
    helpers.run_all()
    assert (bench.counts, bench.stops) == ((0, 600), 1)
    assert caplog.messages == [
        f"recording stops until the server is started again: '{tmp_path}' cannot be written: No space left on device"
    ]
    assert bench.put(1) == [False]
    await bench.writer.close(5)


async def test_a_text_that_is_no_unicode_loses_its_record_alone(tmp_path: Path) -> None:
    bench = WriterBench(tmp_path, DirectHelpers())
    assert not bench.writer.put(response(1, error="\ud800"))
    bench.put(2)
    await bench.writer.close(5)
    assert (bench.numbers(), bench.counts) == ([2], (1, 1))

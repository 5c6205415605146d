"""The queue of traces before the helper that writes them."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.errors import Unavailable
from kernel.observe.execution_reports import ExecutionTimes
from kernel.records import trace_writer as module
from kernel.records.trace import QUEUE_INPUT, TracedTensor, TraceRecord
from kernel.records.trace_export import CollectorDestination
from kernel.records.trace_files import FileDestination, KeptPart, WriteArguments, WriteOutcome, WriteResult
from kernel.records.trace_writer import TraceWriter
from kernel.settings import TraceValues
from tests.protocols.front_door_lab import DirectHelpers, LateHelpers

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.records.trace import TraceOutput
    from kernel.serving.helper_tasks import HelperTask


pytestmark = pytest.mark.anyio


class LosingHelpers(DirectHelpers):
    def add(self, task: HelperTask) -> None:
        task.failed(Unavailable("the helper process was lost (exit code 1)"))


class Bench:
    def __init__(self, path: Path, helpers: DirectHelpers, **settings: int) -> None:
        self.stops = 0
        self.path = path
        self.writer = TraceWriter(helpers, self._stop)
        values = TraceValues(("TIMESTAMPS",), trace_file=str(path), **settings)  # type: ignore[arg-type]
        self.output: TraceOutput = self.writer.file_output(values)

    def _stop(self) -> None:
        self.stops += 1

    def put(self, *ids: int) -> None:
        for id in ids:
            self.output.put(TraceRecord(id, 0, "m", 1, "", ["QUEUE_START", id]))

    def put_usual(self, *ids: int) -> None:
        for id in ids:
            self.output.put_usual((0, id, ("m", 1), "", 1, 2, 3, 4, ExecutionTimes(5, 6, 7, 8), 9), lambda: 10)


def ids(path: Path) -> list[int]:
    return [each["id"] for each in json.loads(path.read_text())]


async def test_what_waits_is_written_when_the_server_stops(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "t", DirectHelpers())
    bench.put(1, 2)
    assert not bench.path.exists()
    await bench.writer.close(5)
    assert ids(bench.path) == [1, 2]
    assert (bench.writer.written_count, bench.writer.lost_count) == (2, 0)


async def test_a_full_batch_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileDestination, "batch", 512)
    bench = Bench(tmp_path / "t", DirectHelpers())
    bench.put(*range(1, 513))
    assert len(ids(bench.path)) == 512
    bench.put(513)
    await bench.writer.close(5)
    assert len(ids(bench.path)) == 513


async def test_each_file_with_an_index_is_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "t", DirectHelpers(), log_frequency=2)
    bench.put(1, 2, 3, 4, 5)
    await bench.writer.close(5)
    assert [ids(tmp_path / f"t.{index}") for index in range(3)] == [[1, 2], [3, 4], [5]]


async def test_the_traces_that_wait_are_counted_as_they_come_go_and_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileDestination, "batch", 3)
    helpers = LateHelpers()
    bench = Bench(tmp_path / "t", helpers, log_frequency=4)
    writer = bench.writer

    def counted_groups() -> int:
        assert writer.waiting_count == sum(group.count for group in writer.waiting)
        return len(writer.waiting)

    most = 0
    for id in range(1, 40):
        bench.put(id)
        most = max(most, counted_groups())
        if id % 7 == 0:
            writer.turns.now()
            helpers.run_all()
            counted_groups()
    assert most > 2
    writer.drop_all()
    assert counted_groups() == 0
    bench.put(41)
    assert counted_groups() == 1
    await writer.close(0)


async def test_usual_traces_and_others_are_in_one_order_and_each_file_has_as_many_as_it_shall(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "t", DirectHelpers(), log_frequency=5)
    bench.put_usual(1, 2, 3)
    bench.put(4)
    bench.put_usual(5, 6)
    bench.put(7, 8)
    bench.put_usual(9, 10, 11)
    await bench.writer.close(5)
    written = [list(dict.fromkeys(ids(tmp_path / f"t.{index}"))) for index in range(3)]
    assert written == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11]]
    assert (bench.writer.written_count, bench.writer.lost_count) == (11, 0)


async def test_usual_traces_that_wait_are_counted_as_they_come_go_and_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileDestination, "batch", 70)
    helpers = LateHelpers()
    bench = Bench(tmp_path / "t", helpers, log_frequency=100)
    other = bench.writer.file_output(TraceValues(("TIMESTAMPS",), trace_file=str(tmp_path / "other")))
    writer, waiting = bench.writer, 0
    for id in range(1, 200):
        bench.put_usual(id)
        if id % 9 == 0:
            other.put_usual((0, id, ("n", 1), "", 1, 2, 3, 4, ExecutionTimes(5, 6, 7, 8), 9), lambda: 10)
        if id % 50 == 0:
            writer.turns.now()
            helpers.run_all()
        waiting = writer.waiting_count
        assert waiting == sum(group.count for group in writer.waiting)
        assert waiting + writer.written_count + _running(helpers) == id + id // 9
    assert writer.drop_all() == waiting
    assert writer.waiting_count == 0
    bench.put_usual(200)
    assert writer.waiting_count == 1
    await writer.close(0)


def _running(helpers: LateHelpers) -> int:
    """Return how many traces the helper has."""
    return sum(len(msgspec.msgpack.decode(task.arguments, type=WriteArguments).records) for task in helpers.waiting)


async def test_usual_traces_that_find_the_queue_full_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileDestination, "batch", 50)
    monkeypatch.setattr(FileDestination, "max_waiting", 70)
    helpers = LateHelpers()
    bench = Bench(tmp_path / "t", helpers)
    bench.put_usual(*range(1, 201))
    assert bench.writer.lost_count == 200 - 70 - _running(helpers)
    helpers.run_all()
    await bench.writer.close(5)


async def test_the_bytes_of_usual_traces_that_wait_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTE_SIZE", 1000)
    monkeypatch.setattr(module, "MAX_WAITING_BYTE_SIZE", 10_000)
    helpers = LateHelpers()
    bench = Bench(tmp_path / "t", helpers)
    bench.put_usual(*range(1, 2001))
    assert bench.writer.lost_count > 1000
    assert bench.writer.waiting_byte_size < 20_000
    helpers.run_all()
    await bench.writer.close(5)


async def test_one_task_runs_at_a_time_and_the_rest_waits_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FileDestination, "batch", 512)
    monkeypatch.setattr(FileDestination, "max_waiting", 600)
    helpers = LateHelpers()
    bench = Bench(tmp_path / "t", helpers)
    with caplog.at_level(logging.WARNING):
        bench.put(*range(1, 1513))
    assert bench.writer.lost_count == 1512 - 512 - 600
    assert [record.getMessage() for record in caplog.records] == [
        "1 trace was lost: too many traces wait to be written"
    ]
    helpers.run_all()
    assert len(ids(bench.path)) == 512


async def test_the_bytes_of_traces_that_wait_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "BATCH_BYTE_SIZE", 1 << 20)
    monkeypatch.setattr(module, "MAX_WAITING_BYTE_SIZE", 3 << 20)
    helpers = LateHelpers()
    bench = Bench(tmp_path / "t", helpers)
    tensors = [TracedTensor(QUEUE_INPUT, "IN", "INT8", [4096], bytes(4096), 4096)] * 64
    with caplog.at_level(logging.WARNING):
        for id in range(1, 41):
            bench.output.put(TraceRecord(id, 0, "m", 1, "", ["QUEUE_START", id], tensors))
    # One MiB, of four traces, is with the helper; three MiB wait.
    assert bench.writer.lost_count == 40 - 4 - 3 * 4
    assert bench.writer.waiting_byte_size == sum(len(group.records) for group in bench.writer.waiting)
    assert [record.getMessage() for record in caplog.records] == [
        "1 trace was lost: more than 3 MiB of traces wait to be written"
    ]
    bench.writer.drop_all()
    assert bench.writer.waiting_byte_size == 0
    bench.put(41)
    await bench.writer.close(0)


async def test_each_cause_of_losses_is_logged_at_once_and_the_rest_when_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FileDestination, "batch", 2)
    monkeypatch.setattr(FileDestination, "max_waiting", 2)
    helpers = HeldHelpers()
    bench = Bench(tmp_path / "t", helpers)
    with caplog.at_level(logging.WARNING):
        bench.put(*range(1, 10))
        helpers.tasks.pop().failed(Unavailable("the helper process was lost (exit code 1)"))
        helpers.tasks.pop().failed(Unavailable("the helper process was lost (exit code 1)"))
        await bench.writer.close(0)
    assert [record.getMessage() for record in caplog.records] == [
        "1 trace was lost: too many traces wait to be written",
        "2 traces were lost: the helper process was lost (exit code 1)",
        "4 traces were lost: too many traces wait to be written",
        "2 traces were lost: the helper process was lost (exit code 1)",
    ]
    assert bench.writer.lost_count == 9


async def test_a_file_that_cannot_be_written_stops_tracing_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path / "no" / "t", DirectHelpers())
    bench.put(1, 2, 3)
    with caplog.at_level(logging.WARNING):
        await bench.writer.close(5)
    assert bench.stops == 1
    assert (bench.writer.written_count, bench.writer.lost_count) == (0, 3)
    problem = f"the trace file '{bench.path}' cannot be written: No such file or directory"
    assert [record.getMessage() for record in caplog.records] == [
        f"tracing stops until its settings are changed: {problem}", f"3 traces were lost: {problem}",
    ]  # fmt: skip


async def test_a_file_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.records.trace_files.MAX_FILE_BYTE_SIZE", 100)
    bench = Bench(tmp_path / "t", DirectHelpers())
    bench.put(1, 2, 3)
    await bench.writer.close(5)
    assert ids(bench.path) == [1, 2, 3]
    assert (bench.stops, bench.writer.written_count, bench.writer.lost_count) == (1, 3, 0)


async def test_a_lost_helper_loses_what_it_had_and_nothing_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "t", LosingHelpers())
    bench.put(1)
    await bench.writer.close(5)
    assert (bench.stops, bench.writer.lost_count) == (0, 1)


class HeldHelpers(DirectHelpers):
    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[HelperTask] = []
        self.some_held = asyncio.Event()

    def add(self, task: HelperTask) -> None:
        self.tasks.append(task)
        self.some_held.set()


class SlowCollector:
    task = "traces.export"
    delay_s = 0.0
    batch = 1
    max_waiting = 10
    rest_factor = CollectorDestination.rest_factor
    full = CollectorDestination.full

    def arguments(self) -> bytes:
        return b""

    def done(self, result: bytes) -> WriteOutcome:
        return WriteOutcome(took_s=1000)


async def test_after_a_slow_export_the_next_one_begins_at_once() -> None:
    helpers = HeldHelpers()
    writer = TraceWriter(helpers, lambda: None)
    for id in (1, 2):
        writer.put(SlowCollector(), TraceRecord(id, 0, "m", 1, ""))
    [first] = helpers.tasks
    helpers.some_held.clear()
    first.done(b"", None)
    await helpers.some_held.wait()
    assert writer.written_count == 1


def written(took_s: float) -> bytes:
    """Return the result of a helper that has written for `took_s` seconds."""
    return msgspec.msgpack.encode(WriteResult(KeptPart(1), took_s=took_s))


async def test_a_long_rest_ends_when_a_whole_batch_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileDestination, "batch", 4)
    helpers = HeldHelpers()
    bench = Bench(tmp_path / "t", helpers)
    bench.put(*range(1, 5))
    bench.put(5)
    helpers.tasks.pop().done(written(took_s=1000), None)
    assert helpers.tasks == [], "it rests"
    bench.put(6, 7)
    assert helpers.tasks == []
    bench.put(8)
    assert len(helpers.tasks) == 1
    assert bench.writer.lost_count == 0


async def test_a_helper_that_is_behind_does_not_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileDestination, "batch", 4)
    helpers = HeldHelpers()
    bench = Bench(tmp_path / "t", helpers)
    bench.put(*range(1, 13))
    for count in (8, 4):
        helpers.tasks.pop().done(written(took_s=1000), None)
        assert len(helpers.tasks) == 1, f"{count} waited"
    helpers.tasks.pop().done(written(took_s=1000), None)
    assert helpers.tasks == []
    assert bench.writer.written_count == 12


async def test_files_with_few_traces_do_not_keep_the_helper_and_the_kernel_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileDestination, "batch", 64)
    monkeypatch.setattr(FileDestination, "delay_s", 0.0)
    helpers = HeldHelpers()
    bench = Bench(tmp_path / "t", helpers, log_frequency=1)
    bench.put(1)
    await helpers.some_held.wait()
    bench.put(*range(2, 202))
    helpers.tasks.pop().done(written(took_s=1000), None)
    bench.put(202)
    assert helpers.tasks == [], "it rests"
    await bench.writer.close(0)


async def test_the_end_does_not_wait_for_ever(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "t", LateHelpers())
    bench.put(1)
    await bench.writer.close(0.001)
    bench.put(2)
    await bench.writer.close(0.001)
    assert bench.writer.lost_count == 1, "what the helper has may still be written"

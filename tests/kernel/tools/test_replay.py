"""Sending the requests of a recording: order, what is not sent, failures, and the report.

When recorded requests are sent again.

What `naiad replay` says where nothing can be sent.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from kernel.records.recording_format import RecordedTensor, RequestRecord, ResponseRecord, segment_name
from kernel.records.replay_target import ReplayedOutput, ReplayedResponse, ReplayFailed, TargetLost
from kernel.tools import replay as module
from kernel.tools.recordings import RecordingIndex
from kernel.tools.replay import DueRequest, Replay, ReplaySchedule, ReplaySettings, due_times, replay_recording
from kernel.tools.replay_report import ReplayReport
from tests.kernel.tools.recorded_files import request, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernel.records.recording_format import Recorded

pytestmark = pytest.mark.anyio

IN = [RecordedTensor("i", "UINT8", [1], 1, data=b"a")]

OUT = [RecordedTensor("o", "UINT8", [1], 1, data=b"b")]

GOOD = [ReplayedResponse([ReplayedOutput("o", "UINT8", [1], b"b")])]


class EchoTarget:
    """Responds with what its function returns. A `kernel.records.replay_target.ReplayTarget`."""

    takes_decoupled = False

    def __init__(self, respond: Callable[[RequestRecord], list[ReplayedResponse]], missing: str = "") -> None:
        self._respond = respond
        self._missing = missing
        self.sent: list[int] = []

    async def check(self) -> None:
        """Do nothing."""

    async def serves(self, model: str) -> bool:
        return model != self._missing

    async def send(self, request: RequestRecord) -> list[ReplayedResponse]:
        self.sent.append(request.number)
        await asyncio.sleep(0)
        return self._respond(request)

    async def close(self) -> None:
        """Do nothing."""


def good(request: RequestRecord) -> list[ReplayedResponse]:
    return GOOD


async def replayed(
    folder: Path,
    records: list[Recorded],
    respond: Callable[[RequestRecord], list[ReplayedResponse]] = good,
    missing: str = "",
) -> tuple[ReplayReport, list[int]]:
    write(folder, 1, *records)
    report, target = ReplayReport("t"), EchoTarget(respond, missing)
    ended = 0

    def progress() -> None:
        nonlocal ended
        ended += 1

    replay = Replay(RecordingIndex(folder), target, ReplaySettings(speed=0, concurrency=2), report)
    await replay.leave_out_missing()
    await replay.run(progress)
    assert ended == replay.total or report.stopped
    return report, target.sent


def of_sequence(number: int, id: int, start: bool = False) -> RequestRecord:
    return RequestRecord(number, number, "m", 1, IN, sequence_id=id, sequence_start=start, in_sequence=True)


async def test_every_request_is_sent_once_and_equal_responses_do_not_differ(tmp_path: Path) -> None:
    records: list[Recorded] = []
    for number in range(50):
        records += (
            RequestRecord(number, number, "m", 1, IN),
            ResponseRecord(number, number + 9, True, outputs=OUT),
        )
    report, sent = await replayed(tmp_path, records)
    assert sent == list(range(50))
    (model,) = report.as_json()["models"]
    assert (report.differs, model["sent"], model["outputs_compared"]) == (False, 50, 50)
    assert model["latency_ns"]["recorded"] == [9, 9, 9]
    assert "No response differs." in report.as_text(20)


async def test_what_cannot_be_sent_or_compared_is_counted_with_the_reason(tmp_path: Path) -> None:
    lacking = [RecordedTensor("i", "UINT8", [1], 1, region="r")]
    records: list[Recorded] = [
        RequestRecord(1, 1, "m", 1, IN, decoupled=True), ResponseRecord(1, 2, True),
        RequestRecord(2, 2, "m", 1, lacking), ResponseRecord(2, 3, True, outputs=OUT),
        of_sequence(3, 5), ResponseRecord(3, 4, True, outputs=OUT),
        RequestRecord(4, 4, "m", 1, IN),
        RequestRecord(5, 5, "m", 1, IN), ResponseRecord(5, 6, True, error="gone", code="cancelled"),
    ]  # fmt: skip
    report, sent = await replayed(tmp_path, records)
    assert sent == [4, 5]
    assert report.skipped == {
        module.DECOUPLED: 1, module.NO_VALUES: 1, module.NO_START: 1, module.UNFINISHED: 1, module.WAS_CANCELLED: 1,
    }  # fmt: skip
    assert (report.differs, report.exit_code, report.verdict) == (False, 2, "Nothing was compared.")


async def test_outputs_that_cannot_be_compared_are_no_success(tmp_path: Path) -> None:
    unknown = [RecordedTensor("o", "UINT8", [1], 1, region="r")]
    records: list[Recorded] = [RequestRecord(1, 1, "m", 1, IN), ResponseRecord(1, 2, True, outputs=unknown)]
    report, sent = await replayed(tmp_path, records)
    assert (sent, report.differs, report.exit_code) == ([1], False, 2)


async def test_requests_to_models_that_the_target_has_not_are_counted_and_not_sent(tmp_path: Path) -> None:
    records: list[Recorded] = []
    for number, model in enumerate(("m", "gone", "gone")):
        records += (RequestRecord(number, number, model, 1, IN), ResponseRecord(number, number, True, outputs=OUT))
    report, sent = await replayed(tmp_path, records, missing="gone")
    assert (sent, report.missing, report.differs, report.exit_code) == ([0], {"gone": 2}, True, 1)
    assert report.verdict == "Responses are missing."
    assert "model 'gone' is not ready at the target: 2 requests not sent\n" in report.as_text(20)


async def test_a_target_that_is_gone_ends_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(request: RequestRecord) -> list[ReplayedResponse]:
        if request.number < 3:
            return GOOD
        raise TargetLost("the connection failed: refused")

    monkeypatch.setattr(module, "MOST_LOST", 5)
    records: list[Recorded] = []
    for number in range(100):
        records += (RequestRecord(number, number, "m", 1, IN), ResponseRecord(number, number, True, outputs=OUT))
    report, sent = await replayed(tmp_path, records, lost)
    assert 8 <= len(sent) < 15
    assert report.stopped.startswith("the target does not respond any more, after ")
    assert report.exit_code == 1


async def test_a_replay_that_a_person_stops_says_how_far_it_has_come(tmp_path: Path) -> None:
    write(tmp_path, 1, *(RequestRecord(number, number * 10**12, "m", 1, IN) for number in range(3)))
    report, ended = ReplayReport("t"), asyncio.Event()
    replay = Replay(RecordingIndex(tmp_path), EchoTarget(good), ReplaySettings(), report)
    run = asyncio.ensure_future(replay.run(ended.set))
    await ended.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (report.stopped, report.exit_code) == ("by the keyboard, after 1 of 3 requests", 130)


async def test_a_request_without_a_response_makes_the_replay_fail(tmp_path: Path) -> None:
    def lost(request: RequestRecord) -> list[ReplayedResponse]:
        raise ReplayFailed("the connection failed: reset")

    records: list[Recorded] = [RequestRecord(1, 1, "m", 1, IN, id="x"), ResponseRecord(1, 2, True, outputs=OUT)]
    report, _ = await replayed(tmp_path, records, lost)
    assert report.differs
    assert report.lines == [("m", "x", "the connection failed: reset")]


async def test_equal_differences_are_shown_once_and_all_are_in_the_json(tmp_path: Path) -> None:
    records: list[Recorded] = []
    for number in range(3):
        records += (
            RequestRecord(number, number, "m", 1, IN, id=f"r{number}"),
            ResponseRecord(number, number, True, error=f"[request id: r{number}] bad", code="internal"),
        )
    report, _ = await replayed(tmp_path, records)
    text = report.as_text(20)
    assert "m: 3 times, first: request r0: no error, and recorded was: [request id: r0] bad\n" in text
    assert text.endswith("Responses differ.\n")
    found = report.as_json()
    assert (found["differs"], len(found["differences"]), found["models"][0]["errors_differing"]) == (True, 3, 3)
    assert [each["count"] for each in found["kinds_of_differences"]] == [3]


async def test_requests_of_a_sequence_are_sent_one_after_the_other(tmp_path: Path) -> None:
    records: list[Recorded] = [of_sequence(number, number % 2, start=number < 2) for number in range(20)]
    records += (ResponseRecord(number, 30, True, outputs=OUT) for number in range(20))
    _, sent = await replayed(tmp_path, records)
    for sequence in (0, 1):
        assert [number for number in sent if number % 2 == sequence] == list(range(sequence, 20, 2))


def taken(schedule: ReplaySchedule, now_ns: int) -> list[int]:
    found = []
    while (index := schedule.take(now_ns)) is not None:
        found.append(index)
    return found


def test_the_recorded_spacing_is_divided_by_the_speed() -> None:
    assert due_times([1000, 1010, 1400], 1, 1000) == [0, 10, 400]
    assert due_times([1000, 1010, 1400], 2, 1000) == [0, 5, 200]
    assert due_times([1000, 1010, 1400], 0, 1000) == [0, 0, 0]
    assert due_times([], 1, 1000) == []


def test_long_pauses_are_shortened() -> None:
    assert due_times([1000, 1010, 9000, 9010], 1, 50) == [0, 10, 60, 70]
    assert due_times([1000, 1010, 9000], 100, 1000) == [0, 0, 80], "the pause is short at that speed"


def test_requests_are_taken_when_they_are_due() -> None:
    schedule = ReplaySchedule([DueRequest(0), DueRequest(5), DueRequest(5), DueRequest(9)], 10)
    assert (taken(schedule, 0), schedule.next_due_ns()) == ([0], 5)
    assert taken(schedule, 4) == []
    assert taken(schedule, 7) == [1, 2]
    assert schedule.latest_ns == 2
    assert taken(schedule, 9) == [3]
    assert schedule.next_due_ns() is None
    assert not schedule.ended_all
    for index in range(4):
        schedule.ended(index)
    assert schedule.ended_all


def test_no_more_requests_are_in_flight_than_the_concurrency_allows() -> None:
    schedule = ReplaySchedule([DueRequest(0)] * 3, 2)
    assert (taken(schedule, 0), schedule.next_due_ns()) == ([0, 1], None)
    schedule.ended(1)
    assert taken(schedule, 30) == [2]
    assert schedule.latest_ns == 30


def test_a_request_of_a_sequence_waits_for_the_one_before_it_and_for_no_other() -> None:
    requests = [DueRequest(0, "a"), DueRequest(0, "a"), DueRequest(0, "b"), DueRequest(0, "a"), DueRequest(0)]
    schedule = ReplaySchedule(requests, 10)
    assert taken(schedule, 0) == [0, 2, 4]
    schedule.ended(2)
    assert taken(schedule, 0) == []
    schedule.ended(0)
    assert taken(schedule, 0) == [1]
    schedule.ended(1)
    assert taken(schedule, 0) == [3]
    assert not schedule.ended_all
    schedule.ended(3)
    schedule.ended(4)
    assert schedule.ended_all


def test_a_freed_request_of_a_sequence_waits_for_the_concurrency() -> None:
    schedule = ReplaySchedule([DueRequest(0, "a"), DueRequest(0, "a"), DueRequest(0), DueRequest(0)], 2)
    assert taken(schedule, 0) == [0, 2]
    schedule.ended(0)
    assert taken(schedule, 0) == [1]
    schedule.ended(2)
    assert taken(schedule, 0) == [3]


def replay(folder: Path, to: str = "127.0.0.1:1", *models: str, protocol: str = "http") -> int:
    return replay_recording(folder, to, ReplaySettings(), models=models, protocol=protocol, as_json=False, shown=20)


def test_a_folder_without_a_recording_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path / "no") == 2
    assert replay(tmp_path) == 2
    (tmp_path / segment_name(1)).write_bytes(b"")
    assert replay(tmp_path) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: '{tmp_path / 'no'}' cannot be read: No such file or directory",
        f"error: there is no recording in '{tmp_path}': no file is called NUMBER.naiadrec",
        f"error: '{tmp_path / segment_name(1)}' has no header: it is empty, or cut",
    ]


def test_models_that_are_there_are_named_where_the_wanted_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1, request(1, model="a"), request(2, model="b"))
    assert replay(tmp_path, "127.0.0.1:1", "c") == 2
    assert capsys.readouterr().err == f"error: there is no request to c in '{tmp_path}': it has requests to a, b\n"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_target_that_does_not_respond_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    write(tmp_path, 1, request(1))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert replay(tmp_path, f"127.0.0.1:{port}", protocol=protocol) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: no inference server responds to {protocol.upper().replace('GRPC', 'gRPC')} at ")
    assert f"http://127.0.0.1:{port}" in error

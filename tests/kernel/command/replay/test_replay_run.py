"""Sending the requests of a recording: order, what is not sent, failures, and the report."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel.command.replay import run as module
from kernel.command.replay.reading import RecordingIndex
from kernel.command.replay.report import ReplayReport
from kernel.command.replay.run import Replay, ReplaySettings
from kernel.recording.format import RecordedTensor, RequestRecord, ResponseRecord
from kernel.recording.replayed import ReplayedOutput, ReplayedResponse, ReplayFailed
from tests.kernel.command.replay.test_replay_reading import write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernel.recording.format import Recorded

pytestmark = pytest.mark.anyio

IN = [RecordedTensor("i", "UINT8", [1], 1, data=b"a")]
OUT = [RecordedTensor("o", "UINT8", [1], 1, data=b"b")]
GOOD = [ReplayedResponse([ReplayedOutput("o", "UINT8", [1], b"b")])]


class EchoTarget:
    """Responds with what its function returns. A `kernel.recording.replayed.ReplayTarget`."""

    takes_decoupled = False

    def __init__(self, respond: Callable[[RequestRecord], list[ReplayedResponse]]) -> None:
        self._respond = respond
        self.sent: list[int] = []

    async def check(self) -> None:
        """Do nothing."""

    async def send(self, request: RequestRecord) -> list[ReplayedResponse]:
        self.sent.append(request.number)
        await asyncio.sleep(0)
        return self._respond(request)

    async def close(self) -> None:
        """Do nothing."""


def good(request: RequestRecord) -> list[ReplayedResponse]:
    return GOOD


async def replayed(
    folder: Path, records: list[Recorded], respond: Callable[[RequestRecord], list[ReplayedResponse]] = good
) -> tuple[ReplayReport, list[int]]:
    write(folder, 1, *records)
    report, target = ReplayReport("t"), EchoTarget(respond)
    ended = 0

    def progress() -> None:
        nonlocal ended
        ended += 1

    replay = Replay(RecordingIndex(folder), target, ReplaySettings(speed=0, concurrency=2), report)
    await replay.run(progress)
    assert ended == replay.total
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
    assert not report.differs


async def test_a_request_without_a_response_makes_the_replay_fail(tmp_path: Path) -> None:
    def lost(request: RequestRecord) -> list[ReplayedResponse]:
        raise ReplayFailed("the connection failed: reset")

    records: list[Recorded] = [RequestRecord(1, 1, "m", 1, IN, id="x"), ResponseRecord(1, 2, True, outputs=OUT)]
    report, _ = await replayed(tmp_path, records, lost)
    assert report.differs
    assert report.lines == [("m", "x", "the connection failed: reset")]


async def test_differences_are_shown_up_to_a_number_and_all_are_in_the_json(tmp_path: Path) -> None:
    records: list[Recorded] = []
    for number in range(3):
        records += (
            RequestRecord(number, number, "m", 1, IN, id=str(number)),
            ResponseRecord(number, number, True, error="bad", code="internal"),
        )
    report, _ = await replayed(tmp_path, records)
    text = report.as_text(2)
    assert "m request 1: no error, and recorded was: bad\n… and 1 more (--show N, or --json)\n" in text
    assert text.endswith("Responses differ.\n")
    found = report.as_json()
    assert (found["differs"], len(found["differences"]), found["models"][0]["errors_differing"]) == (True, 3, 3)


async def test_requests_of_a_sequence_are_sent_one_after_the_other(tmp_path: Path) -> None:
    records: list[Recorded] = [of_sequence(number, number % 2, start=number < 2) for number in range(20)]
    records += (ResponseRecord(number, 30, True, outputs=OUT) for number in range(20))
    _, sent = await replayed(tmp_path, records)
    for sequence in (0, 1):
        assert [number for number in sent if number % 2 == sequence] == list(range(sequence, 20, 2))

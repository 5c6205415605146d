"""What workers print becomes log lines.

What a worker may print: a rate with a burst, for lines and for bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
from typing import TYPE_CHECKING

from backends.launch.output import (
    BURST_S,
    MAX_LINE,
    PAUSE_NS,
    OutputAllowance,
    OutputCapture,
    OutputLimits,
    WorkerOutput,
)
from kernel.testing import FakeClock

if TYPE_CHECKING:
    import pytest


def captured(title: str, limits: OutputLimits | None = None, clock: FakeClock | None = None) -> OutputCapture:
    return OutputCapture(WorkerOutput(title, limits or OutputLimits(), clock or FakeClock()))


async def read_by_the_loop(capture: OutputCapture) -> None:
    """Return when the loop has read what is in the pipes, and has nothing left to log."""
    for pipe in capture._pipes:
        while select.select([pipe._fd], [], [], 0)[0] or pipe._scheduled:  # noqa: ASYNC110 - the loop has to run
            await asyncio.sleep(0)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the worker, without those about dropped ones."""
    lines = [record.getMessage() for record in caplog.records if record.name == "model"]
    return [line for line in lines if "were dropped" not in line]


def test_lines_are_logged_with_the_title_and_the_stream_says_how_loud(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        capture = captured("digits_0")
        os.write(capture.stdout_fd, b"hel")
        os.write(capture.stdout_fd, b"lo\r\n\nagain\nwithout an end")
        os.write(capture.stderr_fd, b"careful \xff\n")
        capture.close_child_ends()
        capture.close()

    with caplog.at_level(logging.DEBUG, "model"):
        asyncio.run(main())
    assert [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "model"] == [
        ("INFO", "digits_0: hello"),
        ("INFO", "digits_0: again"),
        ("INFO", "digits_0: without an end"),
        ("WARNING", "digits_0: careful \ufffd"),
    ]


def test_a_line_without_end_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        capture = captured("m")
        os.write(capture.stdout_fd, b"x" * (MAX_LINE + 1))
        capture.close_child_ends()
        capture.close()

    with caplog.at_level(logging.DEBUG, "model"):
        asyncio.run(main())
    assert [len(r.getMessage()) for r in caplog.records if r.name == "model"] == [MAX_LINE + len("m: ")]


def test_an_event_loop_iteration_logs_a_few_lines_and_goes_on_in_the_next(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        capture = captured("m")
        os.write(capture.stdout_fd, b"".join(b"%d\n" % number for number in range(1000)))
        most = before = 0
        while before < 1000:
            await asyncio.sleep(0)
            most, before = max(most, len(said(caplog)) - before), len(said(caplog))
        assert 0 < most <= 64
        capture.close_child_ends()
        capture.close()

    with caplog.at_level(logging.DEBUG, "model"):
        asyncio.run(main())
    assert said(caplog) == [f"m: {number}" for number in range(1000)]


def test_what_is_above_the_limits_is_read_and_dropped_for_a_second_and_one_line_says_how_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        clock = FakeClock()
        capture = captured("m", OutputLimits(lines_per_s=1, bytes_per_s=0), clock)
        os.write(capture.stdout_fd, b"".join(b"%d\n" % number for number in range(10)))
        for _ in range(100):  # many times what a pipe holds
            os.write(capture.stdout_fd, b"x\n" * 5000)
            await read_by_the_loop(capture)
        assert said(caplog) == [f"m: {number}" for number in range(10)]
        os.write(capture.stdout_fd, b"half a line")
        await read_by_the_loop(capture)
        clock.advance(PAUSE_NS)
        os.write(capture.stdout_fd, b" that goes on\nand a whole one\n")
        await read_by_the_loop(capture)
        capture.close_child_ends()
        capture.close()

    with caplog.at_level(logging.DEBUG, "model"):
        asyncio.run(main())
    assert said(caplog)[10:] == ["m: and a whole one"]
    [notice] = [record.getMessage() for record in caplog.records if "were dropped" in record.getMessage()]
    assert notice.startswith("m: 500000 lines (1000011 bytes) of output were dropped: more than 1 lines per second")


def test_the_last_lines_of_a_worker_are_logged_whatever_it_has_printed(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        capture = captured("m", OutputLimits(lines_per_s=1, bytes_per_s=0))
        for _ in range(10):
            os.write(capture.stderr_fd, b"x\n" * 5000)
            await read_by_the_loop(capture)
        os.write(capture.stderr_fd, b"".join(b"frame %d\n" % number for number in range(30)))
        await read_by_the_loop(capture)
        os.write(capture.stderr_fd, b"ValueError: why")
        capture.close_child_ends()
        capture.close()

    with caplog.at_level(logging.DEBUG, "model"):
        asyncio.run(main())
    lines = said(caplog)
    assert lines[-31:] == [*(f"m: frame {number}" for number in range(30)), "m: ValueError: why"]
    [notice] = [record.getMessage() for record in caplog.records if "were dropped" in record.getMessage()]
    assert notice.startswith(f"m: {50_000 - lines.count('m: x')} lines"), "what was logged or dropped is counted once"


def test_a_process_that_goes_on_printing_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        capture = captured("m")
        writer = os.dup(capture.stdout_fd)
        os.set_blocking(writer, False)
        while True:
            try:
                os.write(writer, b"y\n" * 1000)
            except BlockingIOError:
                break
        capture.close_child_ends()
        capture.close()
        os.close(writer)

    with caplog.at_level(logging.DEBUG, "model"):
        asyncio.run(main())
    assert len(said(caplog)) <= 51


def test_lines_of_messages_count_as_printed_ones(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        clock = FakeClock()
        output = WorkerOutput("m", OutputLimits(lines_per_s=0, bytes_per_s=1), clock)
        output.log(logging.INFO, "x" * 10)
        output.log(logging.INFO, "too much")
        clock.advance(PAUSE_NS)
        output.log(logging.ERROR, "again")
        output.close()
        output.log(logging.ERROR, "at the end")

    with caplog.at_level(logging.DEBUG, "model"):
        asyncio.run(main())
    assert said(caplog) == [f"m: {'x' * 10}", "m: again", "m: at the end"]
    assert "m: 1 lines (8 bytes) of output were dropped: more than 1 bytes per second" in caplog.text


def test_lines_of_many_messages_are_logged_in_several_iterations_and_in_order(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.launch.output.MAX_WAITING", 200)

    async def main() -> None:
        output = WorkerOutput("m", OutputLimits(0, 0), FakeClock())
        for number in range(200):
            output.log(logging.INFO, str(number))
        assert len(said(caplog)) == 32
        await asyncio.sleep(0)
        assert len(said(caplog)) == 64
        while len(said(caplog)) < 200:  # noqa: ASYNC110 - the loop logs them
            await asyncio.sleep(0)
        for number in range(200, 600):
            output.log(logging.INFO, str(number))
        assert len(said(caplog)) == 400, "no more than 200 wait"
        output.close()

    with caplog.at_level(logging.DEBUG, "model"):
        asyncio.run(main())
    assert said(caplog) == [f"m: {number}" for number in range(600)]


S = 1_000_000_000


def taken(allowance: OutputAllowance, now_ns: int, byte_size: int = 1, most: int = 1000) -> int:
    """Return how many lines are allowed now."""
    count = 0
    while count < most and allowance.take(byte_size, now_ns):
        count += 1
    return count


def test_a_quiet_worker_has_a_burst_and_then_the_rate() -> None:
    allowance = OutputAllowance(OutputLimits(lines_per_s=5, bytes_per_s=0), 0)
    assert taken(allowance, 0) == 5 * BURST_S
    assert taken(allowance, S // 10) == 0
    assert taken(allowance, S) == 5
    assert taken(allowance, 2 * S) == 5
    assert taken(allowance, 1000 * S) == 5 * BURST_S


def test_a_line_may_exceed_the_bytes_that_are_left_and_is_paid_later() -> None:
    allowance = OutputAllowance(OutputLimits(lines_per_s=0, bytes_per_s=10), 0)
    assert taken(allowance, 0, byte_size=150) == 1
    assert taken(allowance, 5 * S) == 0
    assert taken(allowance, 6 * S) == 10


def test_without_rates_there_is_no_limit() -> None:
    assert taken(OutputAllowance(OutputLimits(0, 0), 0), 0, byte_size=1 << 40) == 1000

"""What workers print becomes log lines."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from backends.supervision.output_capture import MAX_LINE, OutputCapture

if TYPE_CHECKING:
    import pytest


def test_lines_are_logged_with_the_title_and_the_stream_says_how_loud(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        capture = OutputCapture("digits_0")
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
        capture = OutputCapture("m")
        os.write(capture.stdout_fd, b"x" * (MAX_LINE + 1))
        capture.close_child_ends()
        capture.close()

    with caplog.at_level(logging.DEBUG, "model"):
        asyncio.run(main())
    assert [len(r.getMessage()) for r in caplog.records if r.name == "model"] == [MAX_LINE + len("m: ")]

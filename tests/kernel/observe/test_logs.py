"""Log lines: Triton's forms, switches that work at once, and no line that a client could forge."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING

import pytest

from kernel.observe.logs import set_up_logging
from kernel.settings import LogSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("naiad.test")


@pytest.fixture
def settings() -> Iterator[LogSettings]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    made = LogSettings()
    yield made
    root.handlers[:] = before
    root.setLevel(level)


def test_lines_have_tritons_form(settings: LogSettings, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(settings)
    logger.info("hello")
    line = capsys.readouterr().out
    assert re.fullmatch(r'I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ test_logs\.py:\d+\] "hello"\n', line), line
    settings.update({"log_format": "ISO8601"})
    logger.info("hello")
    line = capsys.readouterr().out
    assert re.fullmatch(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ test_logs\.py:\d+\] "hello"\n', line), line


def test_information_goes_to_standard_output_and_the_rest_to_standard_error(
    settings: LogSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(settings)
    logger.info("one")
    logger.warning("two")
    logger.error("three")
    captured = capsys.readouterr()
    assert "one" in captured.out
    assert [line[0] for line in captured.err.splitlines()] == ["W", "E"]


def test_switches_work_while_the_server_runs(settings: LogSettings, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(settings)
    logger.debug("quiet")
    settings.update({"log_verbose_level": 1, "log_info": False, "log_warning": False, "log_error": False})
    logger.debug("verbose")
    logger.info("off")
    logger.warning("off")
    logger.error("off")
    captured = capsys.readouterr()
    assert "verbose" in captured.out
    assert "quiet" not in captured.out
    assert "off" not in captured.out + captured.err


@pytest.mark.parametrize("text", ["a\nE0101 00:00:00.000000 1 forged.py:1]", "\x1b]0;title\x07", "\r\n", "\u2028"])
def test_a_client_cannot_forge_a_line(settings: LogSettings, capsys: pytest.CaptureFixture[str], text: str) -> None:
    set_up_logging(settings)
    logger.info("model '%s'", text)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "\x1b" not in out
    assert json.loads(out.partition("] ")[2]) == f"model '{text}'"
    assert len(out.splitlines()) == 1


def test_a_very_long_text_is_cut(settings: LogSettings, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(settings)
    logger.info("model '%s'", "x" * 10_000_000)
    assert len(capsys.readouterr().out) < 10_000


def test_a_traceback_stays_on_its_line(settings: LogSettings, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(settings)
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("failed")
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "ValueError: no" in err

"""Log lines have Triton's formats or JSON, settings apply immediately, and clients cannot forge lines."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import warnings
from typing import TYPE_CHECKING

import pytest

from kernel.errors import BadOption
from kernel.observe.log_lines import about_model
from kernel.observe.logs import ESCAPE_VARIABLE
from kernel.settings import LogSettings, LogValues

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kernel.observe.conftest import LogOutput

logger = logging.getLogger("naiad.test")

#: Texts that try to forge a line, to hide one, or to control a terminal.
HOSTILE = [
    "a\nE0101 00:00:00.000000 1 forged.py:1]",
    'a"\nE0101 00:00:00.000000 1 forged.py:1] "',
    "\r\n",
    "a\rb\vc\fd",
    "\x1b]0;title\x07\x1b[2J",
    "\u2028\u2029\x85",
    "\x1c\x1d\x1e",
    "\u202egnp.exe",
    "\u2066\u2069\ufeff\u200b",
    "\ud800 half a pair",
    "\x00",
    "\x9b31m",
    "\U000e0041",
    '"}\n{"level":"ERROR"',
    "%s %d {} \\n",
]


@pytest.fixture
def settings() -> LogSettings:
    return LogSettings()


def test_lines_have_tritons_formats(settings: LogSettings, output: LogOutput) -> None:
    output.set_up(settings)
    logger.info("hello")
    line = output.read().out
    assert re.fullmatch(r'I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ test_logs\.py:\d+\] "hello"\n', line), line
    settings.update({"log_format": "ISO8601"})
    logger.info("hello")
    line = output.read().out
    assert re.fullmatch(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ test_logs\.py:\d+\] "hello"\n', line), line


def test_times_are_utc_and_the_letter_shows_the_severity(settings: LogSettings, output: LogOutput) -> None:
    output.set_up(settings)
    settings.update({"log_verbose_level": 1})
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        record = logger.makeRecord("n", level, "/x/file.py", 12, "é", (), None)
        record.created = 86400.25
        logger.handle(record)
    captured = output.read()
    lines = captured.out.splitlines() + captured.err.splitlines()
    pid = os.getpid()
    assert lines == [f'{letter}0102 00:00:00.250000 {pid} file.py:12] "é"' for letter in "IIWE"]


def test_json_lines_are_objects_with_the_known_fields(settings: LogSettings, output: LogOutput) -> None:
    output.set_up(settings)
    settings.update({"log_format": "json"})
    record = logger.makeRecord("n", logging.INFO, "/x/file.py", 12, "say %s", ("é",), None)
    record.created = 86400.25
    record.request_id = "7"
    record.peer = ""
    logger.handle(record)
    logger.warning("model", extra={"model": "m", "version": "1"})
    captured = output.read()
    assert json.loads(captured.out) == {
        "timestamp": "1970-01-02T00:00:00.250000Z",
        "level": "INFO",
        "logger": "n",
        "pid": os.getpid(),
        "message": "say é",
        "request_id": "7",
    }
    line = json.loads(captured.err)
    assert (line["level"], line["model"], line["version"]) == ("WARNING", "m", "1")


def test_json_lines_name_the_model_that_the_code_works_for(settings: LogSettings, output: LogOutput) -> None:
    output.set_up(settings)
    settings.update({"log_format": "json"})
    with about_model("m", 3):
        logger.info("a")
        logger.info("b", extra={"model": "", "version": ""})
    logger.info("c")
    lines = [json.loads(line) for line in output.read().out.splitlines()]
    assert [(line.get("model"), line.get("version")) for line in lines] == [("m", "3"), (None, None), (None, None)]


def test_information_goes_to_standard_output_and_problems_to_standard_error(
    settings: LogSettings, output: LogOutput
) -> None:
    output.set_up(settings)
    logger.info("one")
    logger.warning("two")
    logger.error("three")
    captured = output.read()
    assert "one" in captured.out
    assert [line[0] for line in captured.err.splitlines()] == ["W", "E"]


def test_settings_apply_while_the_server_runs(settings: LogSettings, output: LogOutput) -> None:
    output.set_up(settings)
    logger.debug("quiet")
    settings.update({"log_verbose_level": 1, "log_info": False, "log_warning": False, "log_error": False})
    logger.debug("verbose")
    logger.info("off")
    logger.warning("off")
    logger.error("off")
    captured = output.read()
    assert "verbose" in captured.out
    assert "quiet" not in captured.out
    assert "off" not in captured.out + captured.err


def test_each_verbose_level_shows_one_more_level_of_records(settings: LogSettings, output: LogOutput) -> None:
    output.set_up(settings)
    for level in (0, 1, 2, 20):
        settings.update({"log_verbose_level": level})
        for number in (logging.DEBUG, logging.DEBUG - 1, 1):
            logger.log(number, "%d", number)
        shown = re.findall(r'"(\d+)"', output.read().out)
        assert shown == {0: [], 1: ["10"], 2: ["10", "9"], 20: ["10", "9", "1"]}[level]


@pytest.mark.parametrize("form", ["default", "ISO8601"])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_client_cannot_forge_a_line(settings: LogSettings, output: LogOutput, text: str, form: str) -> None:
    output.set_up(settings)
    settings.update({"log_format": form})
    logger.info("model '%s'", text)
    out = output.read().out
    assert out.endswith("\n")
    assert out[:-1].isprintable()
    assert len(out.splitlines()) == 1
    assert json.loads(out.partition("] ")[2]) == f"model '{text}'"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_client_cannot_forge_a_json_line(settings: LogSettings, output: LogOutput, text: str) -> None:
    output.set_up(settings)
    settings.update({"log_format": "json"})
    logger.info("%s", text, extra={"request_id": text, "model": text})
    out = output.read().out
    assert out[:-1].isprintable()
    assert out.isascii()
    line = json.loads(out)
    assert (line["message"], line["request_id"], line["model"]) == (text, text, text)
    assert line["level"] == "INFO"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_client_cannot_forge_a_line_without_quotes_either(
    settings: LogSettings, output: LogOutput, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(ESCAPE_VARIABLE, "0")
    output.set_up(settings)
    logger.info('a "model" \\ %s', text)
    out = output.read().out
    assert '] a "model" \\ ' in out
    assert out[:-1].isprintable()
    assert len(out.splitlines()) == 1


def test_a_very_long_text_is_cut(settings: LogSettings, output: LogOutput) -> None:
    output.set_up(settings)
    for form in ("default", "json"):
        settings.update({"log_format": form})
        logger.info("model '%s'", "x" * 10_000_000, extra={"request_id": "y" * 10_000_000})
        assert len(output.read().out) < 10_000
        try:
            raise ValueError("z" * 10_000_000)
        except ValueError:
            logger.exception("failed")
        assert len(output.read().err) < 50_000


@pytest.mark.parametrize("form", ["default", "ISO8601", "json"])
def test_a_traceback_stays_on_its_line(settings: LogSettings, output: LogOutput, form: str) -> None:
    output.set_up(settings)
    settings.update({"log_format": form})
    try:
        raise ValueError("no\nE0101 forged")
    except ValueError:
        logger.exception("failed")
    err = output.read().err
    assert len(err.splitlines()) == 1
    assert "ValueError: no" in err


def test_warnings_of_python_are_log_lines(settings: LogSettings, output: LogOutput) -> None:
    output.set_up(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old\nthing", stacklevel=1)
    err = output.read().err
    assert err.startswith("W")
    assert "old\\nthing" in err


# ---- the log file -------------------------------------------------------------------------------


def test_all_lines_are_appended_to_the_log_file(output: LogOutput, tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("before\n")
    output.set_up(LogSettings(LogValues(log_file=str(file))))
    logger.info("one")
    logger.error("two \ud800")
    assert output.read() == ("", "")
    lines = file.read_text().splitlines()
    assert lines[0] == "before"
    assert [line[0] for line in lines[1:]] == ["I", "E"]


def test_a_log_file_that_cannot_be_written_is_an_error_at_start(output: LogOutput, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="No such file or directory"):
        output.set_up(LogSettings(LogValues(log_file=str(tmp_path / "no" / "x"))))
    with pytest.raises(BadOption, match="Is a directory"):
        output.set_up(LogSettings(LogValues(log_file=str(tmp_path))))


def test_lines_that_a_full_disk_refuses_are_counted(
    output: LogOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.log"
    output.set_up(LogSettings(LogValues(log_file=str(file), log_format="json")))
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kernel.observe.log_writer.os.write", lambda fd, data: write(fd, data[:9]))
    logger.info("torn")
    output.flush()
    monkeypatch.setattr("kernel.observe.log_writer.os.write", full)
    logger.info("lost")
    output.flush()
    monkeypatch.undo()
    logger.info("there is room again")
    output.flush()
    assert output.log.lost_line_count == 2
    torn, *lines = file.read_text().splitlines()
    assert len(torn) == 9
    assert [json.loads(line)["message"] for line in lines] == [
        "2 log lines before this one could not be written",
        "there is room again",
    ]

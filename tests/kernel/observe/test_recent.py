"""The last lines of the log: by model, within limits, without control characters and paths of the server."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from kernel.observe.log_lines import about_model
from kernel.observe.logs import SettingsFilter
from kernel.observe.recent import MAX_LENGTH, MAX_LINES, SERVER, LineStore, RecentLines, make_recent
from kernel.options import HttpOptions, RepositoryOptions, ServerOptions
from kernel.settings import LogSettings, LogValues

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def lines() -> Iterator[RecentLines]:
    found = RecentLines(SettingsFilter(LogSettings(LogValues())))
    logger = logging.getLogger("tests.recent")
    logger.setLevel(1)
    logger.addHandler(found)
    logger.propagate = False
    logging.getLogger("access").addHandler(found)
    yield found
    logger.propagate = True
    logger.removeHandler(found)
    logging.getLogger("access").removeHandler(found)


def texts(lines: RecentLines, model: str = SERVER) -> list[str]:
    return [f"{line.level} {line.text}" for line in lines.since(model, 0)]


def test_lines_are_those_of_their_model(lines: RecentLines) -> None:
    logger = logging.getLogger("tests.recent")
    logger.info("of the server")
    with about_model("m", 3):
        logger.warning("of %s", "a model")
    logger.error("named", extra={"model": "m", "version": "4"})
    assert texts(lines) == ["I of the server"]
    assert texts(lines, "m") == ["W of a model", "E named"]
    assert [line.version for line in lines.since("m", 0)] == ["3", "4"]
    assert texts(lines, "other") == []


def test_only_what_the_log_shows_is_kept(lines: RecentLines) -> None:
    logging.getLogger("tests.recent").debug("verbose")
    logging.getLogger("access").warning("one line for each request")
    assert texts(lines) == []


def test_a_line_has_no_control_characters_and_an_exception_its_last_line(lines: RecentLines) -> None:
    try:
        raise ValueError("bad \x1b[31m\ud800")
    except ValueError:
        logging.getLogger("tests.recent").exception("first\n\nsecond\t%s", "x" * 5000)
    found = texts(lines)
    assert found[0] == "E first"
    assert found[1].startswith("E second\\tx")
    assert len(found[1]) <= MAX_LENGTH + 40
    assert found[2].startswith("E ValueError: bad \\u001b[31m")


def test_a_log_call_with_wrong_arguments_is_kept_as_it_is(lines: RecentLines) -> None:
    lines.handle(logging.LogRecord("tests.recent", logging.WARNING, "", 0, "%d things", ("no",), None))
    assert texts(lines) == ["W %d things"]


def test_later_lines_are_those_with_larger_numbers() -> None:
    store = LineStore()
    for number in range(5):
        store.add("m", "1", 0.0, "I", str(number))
    third = store.since("m", 0)[2]
    assert [line.text for line in store.since("m", third.number)] == ["3", "4"]
    assert store.since("m", 5) == []


def test_a_model_that_prints_much_keeps_its_last_lines() -> None:
    store = LineStore(max_of_model=1000, max_of_all=10_000)
    for number in range(MAX_LINES + 50):
        store.add("short", "1", 0.0, "I", str(number))
    assert len(store.since("short", 0)) == MAX_LINES
    for number in range(50):
        store.add("long", "1", 0.0, "I", f"{number:0100}")
    assert [int(line.text) for line in store.since("long", 0)] == list(range(40, 50))
    store.check()


def test_many_models_share_one_limit_and_the_largest_pays() -> None:
    store = LineStore(max_of_model=1000, max_of_all=1500)
    for number in range(9):
        store.add("large", "1", 0.0, "I", f"{number:0100}")
    for model in range(10):
        store.add(f"m{model}", "1", 0.0, "I", f"{model:0100}")
        store.check()
    assert all(store.since(f"m{model}", 0) for model in range(10))
    assert len(store.since("large", 0)) == 5


@pytest.mark.parametrize(("dashboard", "owned", "expected"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_the_log_of_another_program_is_not_kept(dashboard: bool, owned: bool, expected: int) -> None:
    options = ServerOptions(RepositoryOptions(()), http=HttpOptions(dashboard=dashboard))
    before = list(logging.getLogger().handlers)
    recent = make_recent(options, LogSettings(LogValues()), owned=owned)
    assert (recent is not None) is dashboard
    if recent is not None:
        asyncio.run(recent.start())
        added = [each for each in logging.getLogger().handlers if each not in before]
        asyncio.run(recent.close())
        assert len(added) == expected
    assert logging.getLogger().handlers == before

"""The loading of the models is a bar on a terminal, and lines of the log elsewhere."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.repository.load_progress import LoadStep
from kernel.tools.terminal import LoadDisplay, bar_text
from tests.own_records import own_records

if TYPE_CHECKING:
    import pytest

S = 1_000_000_000
STEP = LoadStep(40, 10, 1, 2 * S, ["bert", "resnet"], "bert", 2 * S)


class RecordedStatus:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def show_status(self, text: str) -> None:
        self.shown.append(text)


def display(*, bar: bool) -> tuple[LoadDisplay, RecordedStatus]:
    log: Any = RecordedStatus()
    return LoadDisplay(log, bar=bar), log


def at(elapsed_ns: int) -> LoadStep:
    return msgspec.structs.replace(STEP, elapsed_ns=elapsed_ns)


def test_the_log_has_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shown, _ = display(bar=False)
    for quarter in range(4 * 35):
        shown.show(at(quarter * S // 4))
    shown.close()
    assert [record.getMessage() for record in caplog.records] == [STEP.text] * 3
    assert "loading 'bert', 'resnet'" in STEP.text


def test_a_short_loading_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for bar in (True, False):
        shown, status = display(bar=bar)
        shown.show(at(S - 1))
        assert (status.shown, own_records(caplog)) == ([], [])


def test_a_terminal_has_a_bar_until_the_models_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shown, status = display(bar=True)
    shown.show(STEP)
    shown.close()
    assert "bert" in status.shown[0]
    assert status.shown[1:] == [""]
    assert own_records(caplog) == []


def test_a_bar_fits_into_one_line_of_the_terminal() -> None:
    for width in (1, 20, 40, 80, 200):
        text = bar_text(STEP, width, colour=False)
        assert len(text) <= width
        assert "\n" not in text
    assert bar_text(STEP, 200, colour=False).endswith(f" {STEP.text} ")


def test_names_of_models_cannot_control_the_terminal() -> None:
    text = bar_text(msgspec.structs.replace(STEP, slowest="\x1b[2J"), 200, colour=False)
    assert "\x1b" not in text

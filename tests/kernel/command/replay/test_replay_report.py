"""The report of a replay."""

from __future__ import annotations

import pytest

from kernel.command.replay import report as module
from kernel.command.replay.comparing import Comparison
from kernel.command.replay.report import ReplayReport

BEYOND = "output '{}' differs in {} of 2 elements, by at most {}; element {} is {}, and recorded was {}"


def report_of(*texts: str) -> ReplayReport:
    report = ReplayReport("t")
    for number, text in enumerate(texts):
        report.add("m", f"r{number}", Comparison([text], compared=1), 1, 1)
    return report


@pytest.mark.parametrize(("one", "other", "same"), [
    (BEYOND.format("OUT", 1, 0.25, 0, 2.25, 2.0), BEYOND.format("OUT", 2, "1e-07", 1, -1.5, "nan"), True),
    (BEYOND.format("OUTPUT0", 1, 0.25, 0, 2.25, 2.0), BEYOND.format("OUTPUT1", 1, 0.25, 0, 2.25, 2.0), False),
    ("element 1 is b'cc', and recorded was b'b'", "element 7 is b'it\\'s', and recorded was b\"a'b\"", True),
    ("[request id: a] wrong", "[request id: <id_unknown>] wrong", True),
    ("another error: a; recorded was: b", "another error: c; recorded was: b", False),
])  # fmt: skip
def test_texts_that_differ_in_values_are_of_one_kind(one: str, other: str, same: bool) -> None:
    kinds = report_of(one, other).kinds
    assert len(kinds) == (1 if same else 2)
    assert kinds[0].text == one


def test_the_most_frequent_kind_comes_first_and_the_rest_is_counted() -> None:
    text = report_of("seldom", "often", "often", "other").as_text(1)
    assert "m: 2 times, first: request r1: often\n… and 2 more of 2 other kinds (--show N, or --json)\n" in text
    assert "seldom" not in text


def test_what_is_kept_has_a_limit_and_everything_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LINES", 3)
    monkeypatch.setattr(module, "MOST_KINDS", 2)
    found = report_of("a", "b", "c", "d").as_json()
    assert (len(found["differences"]), found["difference_count"]) == (3, 4)
    assert sum(each["count"] for each in found["kinds_of_differences"]) == 4
    assert len(found["kinds_of_differences"]) == 3


def test_the_largest_distance_is_that_of_all_requests() -> None:
    report = ReplayReport("t")
    for distance in (0.5, 2.0, 1.0):
        report.add("m", "", Comparison(["d"], compared=1, largest_distance=distance), None, 1)
    (model,) = report.as_json()["models"]
    assert model["largest_distance"] == 2.0
    assert "| 2 " in report.as_text(1)


def test_texts_of_servers_cannot_change_the_terminal() -> None:
    assert "\x1b" not in report_of("an error: \x1b[2J").as_text(1)


@pytest.mark.parametrize(("comparison", "code", "verdict"), [
    (Comparison(compared=1), 0, "No response differs."),
    (Comparison(["d"], compared=1), 1, "Responses differ."),
    (Comparison(not_compared=1), 2, "Nothing was compared."),
])  # fmt: skip
def test_the_exit_code_says_what_was_found_out(comparison: Comparison, code: int, verdict: str) -> None:
    report = ReplayReport("t")
    report.add("m", "", comparison, 1, 1)
    assert (report.exit_code, report.verdict) == (code, verdict)

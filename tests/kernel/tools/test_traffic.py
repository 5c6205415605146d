"""`naiad traffic` and `naiad rollout`: arguments, and what is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import BadOption
from kernel.tools.traffic import (
    EXIT_CODES,
    changes_of,
    history,
    rollout_text,
    seconds,
    shadow_text,
    show_traffic,
    traffic_text,
)
from kernel.traffic.rollout_states import RolloutSettings, RolloutState, described

if TYPE_CHECKING:
    from pathlib import Path


def test_weights_labels_and_keys_are_members_of_the_rule() -> None:
    assert changes_of(["3=95", "canary=5"], ["canary=4"], "request-id", None) == {
        "weights": {"3": 95, "canary": 5}, "labels": {"canary": 4}, "key": "request-id",
    }  # fmt: skip
    assert changes_of([], [], None, None) == {}


def test_a_file_replaces_every_member(tmp_path: Path) -> None:
    file = tmp_path / "traffic.toml"
    file.write_text("weights = { '3' = 1 }")
    empty: dict[str, Any] = {
        "labels": {},
        "rules": [],
        "key": "",
        "salt": "",
        "shadow": None,
        "outputs": {},
        "rollout": {},
        "feedback": None,
    }
    assert changes_of([], [], None, file) == {**empty, "weights": {"3": 1}}


@pytest.mark.parametrize("text", ["3", "=3", "a=", "a=-1", "a=1.5", "a=" + "1" * 19])
def test_a_weight_that_is_no_pair_is_an_error(text: str) -> None:
    with pytest.raises(BadOption, match="expected TARGET=WEIGHT with a whole number"):
        changes_of([text], [], None, None)


def test_contradictions_and_wrong_files_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "traffic.toml"
    with pytest.raises(BadOption, match="cannot be read"):
        changes_of([], [], None, file)
    file.write_text("weights = 3")
    with pytest.raises(BadOption, match="Expected `object`"):
        changes_of([], [], None, file)
    with pytest.raises(BadOption, match="--file replaces the whole rule"):
        changes_of(["3=1"], [], None, file)
    with pytest.raises(BadOption, match="--reset cannot be used with another change"):
        show_traffic("127.0.0.1:1", "m", weights=["3=1"], reset=True)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(BadOption, match="^no server responds at http://127.0.0.1:1: .*--url$"):
        show_traffic("127.0.0.1:1", "m")


def test_the_report_is_a_table() -> None:
    target = {"text": "canary", "model": "m", "version": "4", "weight": 5, "share": 500, "trouble": ""}
    found: dict[str, Any] = {
        "model": "m", "source": "file", "file_error": "no", "targets": [target],
        "rule": {"key": "request-id", "rules": [{"header": "x-a", "is": ["1", "2"], "to": "canary"}]},
        "requests": [{"model": "m", "version": 4, "reason": "key", "count": 7},
                     {"model": "m", "version": 4, "reason": "rule", "count": 2}],
    }  # fmt: skip
    text = traffic_text(found)
    assert "traffic.toml has no effect: no" in text
    assert "5 %" in text
    assert " 9 " in text
    assert "rule: header x-a = 1 or 2 -> canary" in text


@pytest.mark.parametrize(("text", "expected"), [("30", 30), ("30s", 30), ("1.5m", 90), ("2h", 7200), ("0", 0)])
def test_times(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "m", "10 m", "-1s", "1d", "1e3"])
def test_wrong_times(text: str) -> None:
    with pytest.raises(BadOption, match="is no time: expected a number with s, m or h"):
        seconds(text)


def test_the_state_of_a_rollout_is_printed_with_its_numbers() -> None:
    state = RolloutState(3, 4, RolloutSettings(4), "step", 1)
    found: dict[str, Any] = {
        "candidate": 4, "stable": 3, "described": described(state), "seconds_in_phase": 3.5, "reason": "READY",
        "phase": "step",
        "verdict": {"decision": "inconclusive", "sentence": "too few"},
        "guards": {"errors": {"candidate": 9, "candidate_bad": 1, "stable": 80, "stable_bad": 0}},
    }  # fmt: skip
    text = rollout_text("m", found)
    assert "m: version 4 in place of 3: at step 2 of 5 (5 %), 3.5 s" in text
    assert "verdict: inconclusive\n  too few\n" in text
    assert "too few" not in rollout_text("m", {**found, "phase": "aborted"}), "its reason says what decided"
    assert "1 of 9" in text


def test_the_history_says_which_members_of_the_rule_somebody_has_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules: list[Any] = [{"weights": {"3": 1}, "labels": {"a": 4}, "key": "request-id"}, {"weights": {"3": 1}}, None]
    found = [{"time": "t", "by": "x", "rule": rule, "reason": ""} for rule in rules]
    monkeypatch.setattr("kernel.tools.traffic.call", lambda *_: {"history": found})
    history("m")
    rows = capsys.readouterr().out.splitlines()[3:-1]
    assert [row.split("|")[4].strip() for row in rows] == ["labels, key", "", ""]


def test_the_worst_pairs_are_printed_with_their_distances() -> None:
    worst = [{"why": "output 'OUT': values", "distance": 166.2}, {"why": "error", "distance": None}]
    shadow = {
        "to": "canary", "active": True, "trouble": "", "pairs": 2, "different": 2, "sampled": 2, "dropped": {},
        "outputs": {}, "worst": worst,
    }  # fmt: skip
    text = shadow_text(shadow)
    assert "worst: output 'OUT': values, 166 times the tolerance\nworst: error\n" in text


def test_every_phase_has_an_exit_code() -> None:
    assert EXIT_CODES.keys() == {"loading", "step", "paused", "done", "aborted"}

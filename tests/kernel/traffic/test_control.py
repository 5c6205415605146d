"""Where the traffic rule of a model comes from, and what is known of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kernel.errors import InternalError, InvalidArgument, ModelNotFound
from kernel.traffic.control import MOST_CHANGES, Traffic
from tests.kernel.traffic.traffic_lab import TrafficLab


@pytest.fixture
def lab() -> TrafficLab:
    return TrafficLab()


def test_the_file_decides_until_a_client_sets_a_rule_and_again_after_the_reset(
    lab: TrafficLab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.traffic.set_file("m", b"weights = { '3' = 1 }")
    assert (lab.send(), lab.traffic.report("m")["source"]) == ("m:3", "file")
    lab.rule(weights={"4": 1})
    assert (lab.send(), lab.traffic.report("m")["source"]) == ("m:4", "client")
    lab.traffic.set_file("m", b"weights = { '3' = 1 }\nkey = 'request-id'")
    assert lab.send() == "m:4"
    assert "the new traffic.toml is not used, because a client has set another rule" in caplog.text
    lab.traffic.reset("m", "a test")
    assert lab.send() == "m:3"
    assert lab.traffic.report("m")["rule"] == {"weights": {"3": 1}, "key": "request-id"}


def test_a_client_changes_members_of_the_rule_of_the_file(lab: TrafficLab) -> None:
    lab.traffic.set_file("m", b"labels = { a = 3 }\nweights = { a = 1 }")
    lab.rule(key="request-id")
    assert lab.traffic.report("m")["rule"] == {"labels": {"a": 3}, "weights": {"a": 1}, "key": "request-id"}


def test_a_file_that_is_removed_has_no_effect_any_more(lab: TrafficLab) -> None:
    lab.traffic.set_file("m", b"weights = { '3' = 1 }\nlabels = { a = 3 }")
    lab.traffic.set_file("m", None)
    assert lab.send() == "m:4"
    assert not lab.catalog.has_label("m", "a")
    assert lab.traffic.report("m")["source"] == "none"


def test_a_wrong_file_changes_nothing_and_says_what_is_wrong_once(
    lab: TrafficLab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.traffic.set_file("m", b"weights = { '3' = 1 }")
    for _ in range(3):
        lab.traffic.set_file("m", b"weights = { x = 1 }")
    assert lab.send() == "m:3"
    assert "'x' in 'weights' names no target" in lab.traffic.report("m")["file_error"]
    assert caplog.text.count("traffic.toml has no effect") == 1
    lab.traffic.set_file("m", None, InternalError("failed to read it"))
    assert lab.traffic.report("m")["file_error"] == "failed to read it"
    lab.traffic.set_file("m", b"weights = { '3' = 1 }")
    assert "file_error" not in lab.traffic.report("m")


def test_the_same_file_again_is_no_change(lab: TrafficLab) -> None:
    lab.traffic.set_file("m", b"weights = { '3' = 1 }")
    generation = lab.catalog.generation
    lab.traffic.set_file("m", b"weights = { '3' = 1 }  # a comment")
    assert lab.catalog.generation == generation
    assert len(lab.traffic.report("m")["history"]) == 1


def test_the_history_says_who_changed_what_and_is_bounded(lab: TrafficLab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lab.rule(weights={"3": 1})
    assert lab.traffic.report("m")["history"] == [
        {"time": "2026-11-28T00:00:00+00:00", "by": "a test", "rule": {"weights": {"3": 1}}, "reason": ""}
    ]
    assert "traffic rule {'weights': {'3': 1}} in place of None, set by a test" in caplog.text
    for weight in range(MOST_CHANGES + 5):
        lab.rule(weights={"3": weight + 2})
    assert len(lab.traffic.report("m")["history"]) == MOST_CHANGES


def test_a_rule_and_a_history_have_a_most_size(lab: TrafficLab) -> None:
    def rule(count: int) -> dict[str, Any]:
        values = [f"{number:0200}" for number in range(50)]
        return {"rules": [{"header": "x", "is": values, "to": "3"}] * count}

    with pytest.raises(InvalidArgument, match="a traffic rule may have 262144 bytes in JSON, and this one has"):
        lab.rule(**rule(30))
    for number in range(2 * MOST_CHANGES):
        lab.rule(**rule(20), salt=str(number))
    found = lab.traffic.report("m")["history"]
    assert [each["rule"]["salt"] for each in found] == [str(2 * MOST_CHANGES - 1)], "each takes most of the limit"
    lab.rule(weights={"3": 1}, rules=[])
    assert len(lab.traffic.report("m")["history"]) == 2


def test_what_a_restart_needs_is_made_again_for_the_model_that_has_changed_only(lab: TrafficLab) -> None:
    lab.add(1, "n")
    lab.traffic.change("n", {"weights": {"1": 1}}, "a test")
    first = lab.traffic.document()
    lab.rule(weights={"3": 1})
    second = lab.traffic.document()
    assert second["n"] is first["n"]
    assert second["m"]["rule"] == {"weights": {"3": 1}}
    lab.rule(weights={"3": 2})
    assert lab.traffic.document()["m"]["rule"] == {"weights": {"3": 2}}
    assert second["m"]["rule"] == {"weights": {"3": 1}}, "the thread that writes it may have it still"


def test_an_unknown_model_has_no_rule(lab: TrafficLab) -> None:
    for call in (
        lambda: lab.traffic.report("n"),
        lambda: lab.traffic.change("n", {"weights": {"1": 1}}, ""),
        lambda: lab.traffic.reset("n", ""),
    ):
        with pytest.raises(ModelNotFound):
            call()


def test_a_wrong_change_changes_nothing(lab: TrafficLab) -> None:
    with pytest.raises(InvalidArgument, match="'canary' in 'weights' names no target"):
        lab.rule(weights={"canary": 1})
    assert lab.traffic.report("m")["source"] == "none"


def test_rules_are_refused_where_repositories_are_namespaces(lab: TrafficLab) -> None:
    traffic = Traffic(lab.kernel.rules, lab.front.clock, lab.kernel.budget, namespacing=True)
    with pytest.raises(InvalidArgument, match="--model-namespacing"):
        traffic.change("m", {"weights": {"3": 1}}, "")
    traffic.set_file("m", b"weights = { '3' = 1 }")
    assert "--model-namespacing" in traffic.report("m")["file_error"]


def test_the_shares_are_figures(lab: TrafficLab) -> None:
    lab.rule(labels={"a": 3}, weights={"a": 3, "4": 1})
    shares = lab.traffic.shares()["m"]
    assert [(share.model, share.version, share.share) for share in shares] == [("m", "3", 0.75), ("m", "4", 0.25)]

"""Rollouts in a kernel whose versions execute nothing by themselves."""

from __future__ import annotations

import json
import random
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InternalError, InvalidArgument, RequestCancelled
from kernel.observe.metric_rules import MetricKind
from kernel.serving.catalog import ModelState
from kernel.traffic.control import WATCH_NS, Traffic
from kernel.traffic.rollout_states import RolloutSettings
from kernel.traffic.rollout_trial import BASELINE, RolloutTrial
from tests.kernel.traffic.traffic_lab import Keeper, RolloutLab

if TYPE_CHECKING:
    from kernel.traffic.rollout_trial import Side


@pytest.fixture
def lab() -> RolloutLab:
    return RolloutLab()


@pytest.mark.parametrize(("value", "phase", "count"), [(1.0, "step", 3700), (2.0, "aborted", 20)])
def test_the_guard_of_outputs_looks_at_pairs_of_both_versions(value: float, phase: str, count: int) -> None:
    lab = RolloutLab()
    lab.start(guards=["errors", "outputs"])
    lab.look()
    assert lab.traffic.report("m")["rule"]["shadow"] == {"to": "canary", "percent": 100}
    lab.execute(2000)
    assert lab.look()["share"] == 50, "there is no pair yet"
    lab.pairs(count, value)
    status = lab.look()
    assert (status["phase"], status["share"]) == (phase, 100 if phase == "step" else 0)
    assert status["guards"]["outputs"]["candidate"] >= count
    if phase == "aborted":
        assert "different outputs in" in status["reason"]
        assert "shadow" not in lab.traffic.report("m")["rule"]
        assert lab.traffic.report("m")["shadow"]["different"] == count, "the report stays to be looked at"


def test_pairs_of_clients_that_name_a_version_and_pairs_of_two_errors_do_not_count(lab: RolloutLab) -> None:
    lab.start(guards=["errors", "outputs"])
    lab.look()
    for version, fails in (("3", False), ("", True)):
        for _ in range(40):
            request = lab.request(model_version=version)
            lab.kernel.submit(request)
            if request in lab.models[4].live.instance_of:
                lab.respond(request)
                continue
            for each in (request, None):
                found = each or next(iter(lab.models[4].live.instance_of))
                if fails:
                    found.fail(InvalidArgument("no such number"))
                else:
                    lab.respond(found)
    assert lab.traffic.report("m")["shadow"]["pairs"] >= 40
    assert lab.look()["guards"]["outputs"]["candidate"] == 0


def test_a_counter_of_the_model_can_be_a_guard(lab: RolloutLab) -> None:
    series = {}
    for version, model in lab.models.items():
        family = model.statistics.custom.define("empty_total", "", MetricKind.COUNTER)
        series[version] = model.statistics.custom.hold(family, (), ())
        series[version].value = 1000  # what was counted before the rollout
    lab.start(guards=["metric:empty_total"])
    lab.look()
    lab.execute(1000)
    series[3].value += 5
    series[4].value += 5
    assert lab.look()["guards"]["metric:empty_total"]["candidate_bad"] == 5
    assert lab.look()["phase"] == "step"
    series[4].value += 30
    status = lab.look()
    assert status["phase"] == "aborted"
    assert "events of empty_total: candidate 35 of " in status["reason"]


@pytest.mark.parametrize(
    ("guards", "key", "text"),
    [
        (["metric:a", "outputs"], "", "a guard 'metric:NAME' is not possible with 'outputs'"),
        (["metric:a"], "request-id", "a guard 'metric:NAME' is not possible with a key"),
        (["metric:a b"], "", "'metric:a b' is no guard"),
    ],
)
def test_counters_that_cannot_be_guards(lab: RolloutLab, guards: list[str], key: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        lab.start(guards=guards, key=key)


def test_a_rule_has_the_defaults_of_rollouts(lab: RolloutLab) -> None:
    lab.rule(rollout={"steps": [7, 100], "guards": ["errors"], "every_s": 3})
    lab.traffic.start_rollout("m", {"to": 4, "every_s": 0, "stable": 3}, "a test")
    settings = lab.traffic.rollouts.states()["m"].settings
    assert (settings.steps, settings.guards, settings.every_s) == ((7, 100), ("errors",), 0)
    assert lab.traffic.report("m")["rule"]["rollout"]["steps"] == [7, 100], "the next rollout has them too"


def test_a_rollout_begins_by_itself_when_a_version_is_ready_and_is_not_tried_again() -> None:
    lab = RolloutLab(versions=(3,))
    text = b"labels = { stable = 3 }\nweights = { stable = 1 }\nrollout = { automatic = true, steps = [50] }"
    lab.traffic.set_file("m", text)
    lab.front.clock.advance(WATCH_NS)
    assert lab.traffic.rollouts.states() == {}
    lab.models[4] = lab.add(4)
    assert {lab.send() for _ in range(20)} == {"m:3"}
    lab.front.clock.advance(WATCH_NS)
    assert lab.look()["share"] == 50
    assert lab.traffic.report("m")["history"][-2]["by"] == "traffic.toml"
    lab.execute(300, error=InternalError("no"), only=4)
    assert lab.look()["phase"] == "aborted"
    lab.front.clock.advance(WATCH_NS * 5)
    assert lab.look()["phase"] == "aborted", "the same version is not tried again"
    lab.models[5] = lab.add(5)
    lab.front.clock.advance(WATCH_NS)
    status = lab.look()
    assert (status["candidate"], status["stable"], status["phase"]) == (5, 3, "step")
    lab.traffic.command_rollout("m", "promote", "a test")
    lab.models[6] = lab.add(6)
    lab.front.clock.advance(WATCH_NS)
    assert (lab.look()["candidate"], lab.look()["stable"]) == (6, 5)


@pytest.mark.parametrize(
    ("rollout", "text"),
    [
        ({"steps": []}, "'rollout' is wrong: "),
        ({"to": 4}, "'to' cannot be in 'rollout'"),
        ({"automatic": 1}, "'automatic' in 'rollout' must be true or false"),
        ({"automatic": True}, "needs 'weights' with the stable version"),
    ],
)
def test_wrong_defaults_of_rollouts_are_refused(lab: RolloutLab, rollout: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        lab.rule(rollout=rollout)


def test_the_guard_of_outputs_needs_a_model_that_can_be_compared(lab: RolloutLab) -> None:
    lab.rule(outputs={"X": "top1"})
    with pytest.raises(InvalidArgument, match="the guard 'outputs' is not possible: model 'm' has no output 'X'"):
        lab.start(guards=["outputs"])


def test_a_candidate_that_is_as_good_gets_all_requests_step_by_step(lab: RolloutLab) -> None:
    lab.start()
    assert lab.look()["share"] == 50
    lab.execute(BASELINE * 3)
    assert lab.look()["phase"] == "step", "nothing was slow: that is inconclusive"
    for _ in range(400):
        lab.execute(5)
        lab.execute(1, ms=9)
    status = lab.look()
    assert (status["share"], status["step"]) == (100, 2)
    lab.execute(10)
    assert lab.look()["phase"] == "done"
    assert {lab.send() for _ in range(20)} == {"m:4"}
    assert lab.send(model_version="previous") == "m:3"
    assert lab.models[4].statistics.observer is None
    lab.traffic.command_rollout("m", "abort", "a test")
    assert {lab.send() for _ in range(20)} == {"m:3"}


def test_a_candidate_with_errors_is_stopped_and_the_reason_says_the_numbers(
    lab: RolloutLab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.start()
    lab.execute(60, error=InternalError("wrong"), only=4)
    status = lab.look()
    assert (status["phase"], status["share"]) == ("aborted", 0)
    assert "errors: candidate " in status["reason"]
    assert "worse, evidence" in caplog.text
    assert {lab.send() for _ in range(20)} == {"m:3"}
    assert lab.traffic.report("m")["rule"]["weights"] == {"stable": 1}


def test_a_slow_candidate_is_stopped(lab: RolloutLab) -> None:
    lab.start()
    lab.execute(BASELINE * 3)
    lab.execute(100, ms=20, only=4)
    status = lab.look()
    assert (status["phase"], status["slow_ms"]) == ("aborted", 1)
    assert "slow responses" in status["reason"]


def test_what_clients_do_wrong_is_no_evidence(lab: RolloutLab) -> None:
    lab.start(guards=["errors"])
    lab.execute(200, error=InvalidArgument("your fault"), only=4)
    lab.execute(200, error=RequestCancelled(), only=4)
    assert lab.look()["guards"]["errors"] == {"candidate": 0, "candidate_bad": 0, **{
        name: lab.look()["guards"]["errors"][name] for name in ("stable", "stable_bad")}}  # fmt: skip


def test_requests_that_name_a_version_are_no_evidence(lab: RolloutLab) -> None:
    lab.start(guards=["errors"])
    for _ in range(50):
        request = lab.request(model_version="4")
        lab.kernel.submit(request)
        request.fail(InternalError("wrong"))
    assert lab.look()["guards"]["errors"]["candidate"] == 0


def test_one_key_that_always_fails_counts_once(lab: RolloutLab) -> None:
    lab.start(key="request-id", guards=["errors"])
    for _ in range(500):
        request = lab.request(id="user")
        lab.kernel.submit(request)
        request.fail(InternalError("wrong"))
    status = lab.look()
    assert status["phase"] == "step"
    assert status["guards"]["errors"]["candidate_bad"] + status["guards"]["errors"]["stable_bad"] == 1


def test_workers_that_die_stop_the_rollout_at_once(lab: RolloutLab) -> None:
    lab.start()
    lab.look()
    lab.models[4].statistics.workers_lost += 1
    assert lab.look()["phase"] == "step"
    lab.models[4].statistics.workers_lost += 1
    assert lab.look()["reason"] == "workers of the candidate have died 2 times"


def test_a_candidate_that_hangs_is_stopped_and_its_requests_fail(lab: RolloutLab) -> None:
    lab.start(hang_s=1)
    requests = [lab.request() for _ in range(10)]
    for request in requests:
        lab.kernel.submit(request)
    lab.execute(3)
    for _ in range(6):
        lab.look()
    status = lab.look()
    assert (status["phase"], status["reason"]) == ("aborted", "the candidate has ended no execution for 1 s")
    for _ in range(3):
        lab.look()
    stuck = [request for request in requests if request not in lab.models[3].live.instance_of]
    assert stuck
    assert all(request.finished for request in stuck)
    for request in requests:
        if not request.finished:
            lab.respond(request)


def test_thousands_of_requests_at_a_candidate_that_hangs_fail_within_a_second_also_if_a_rollout_begins_again(
    lab: RolloutLab,
) -> None:
    lab.kernel.budget.limit_byte_size = 1 << 30
    lab.start(hang_s=1)
    requests = [lab.request() for _ in range(4000)]
    for request in requests:
        lab.kernel.submit(request)
    stuck = list(lab.models[4].live.instance_of)
    assert len(stuck) > 1500
    while lab.traffic.rollouts.is_active("m"):
        lab.look()
    assert sum(request.finished for request in stuck) <= 64, "a slice at a time"
    lab.start(hang_s=1)
    lab.front.clock.advance(1_000_000_000)
    assert all(request.finished for request in stuck)
    for request in requests:
        if not request.finished:
            lab.respond(request)


def test_a_candidate_that_is_not_loaded_gets_nothing_until_it_is(lab: RolloutLab) -> None:
    lab.start(to=5)
    assert lab.look()["phase"] == "loading"
    lab.add(5)
    assert {lab.send() for _ in range(20)} == {"m:4"}
    assert lab.look()["share"] == 50
    assert {lab.send() for _ in range(50)} == {"m:4", "m:5"}
    lab.catalog.set_state("m", 5, ModelState.UNAVAILABLE, "it is broken")
    assert lab.look()["reason"] == "it is broken"


def test_a_rollout_decides_alone_about_the_rule(lab: RolloutLab) -> None:
    lab.rule(labels={"beta": 4}, weights={"3": 1}, rules=[{"header": "a", "to": "beta"}])
    lab.start()
    assert lab.traffic.report("m")["rule"]["labels"] == {"beta": 4, "stable": 3, "canary": 4}
    assert lab.send({"a": "1"}) == "m:4"
    with pytest.raises(InvalidArgument, match="a rollout of model 'm' decides about its traffic"):
        lab.rule(weights={"3": 1})
    with pytest.raises(InvalidArgument, match="is at step 1 of 2"):
        lab.start()
    with pytest.raises(InvalidArgument, match="cannot resume"):
        lab.traffic.command_rollout("m", "resume", "a test")


def test_the_stable_version_is_the_one_with_the_largest_share(lab: RolloutLab) -> None:
    lab.rule(weights={"3": 9, "4": 1})
    with pytest.raises(InvalidArgument, match="version 3 has the traffic of model 'm' already"):
        lab.start(to=3)
    lab.start(to=4)
    assert lab.look()["stable"] == 3


def test_a_version_that_is_named_as_stable_must_be_ready(lab: RolloutLab) -> None:
    with pytest.raises(Exception, match="version 7 is not found"):
        lab.start(stable=7)
    assert lab.traffic.rollouts.status("m") is None


def trial_at_100(stable_errors: float, candidate_errors: float) -> str:
    """Return the decision after 4,000 requests at 100 %, and 8,000 at 50 % with the same errors of both."""
    random_, trial = random.Random(5), RolloutTrial(RolloutSettings(4, guards=("errors",)), sticky=False)
    sides: tuple[tuple[Side, float], ...] = (("stable", stable_errors), ("candidate", stable_errors))
    trial.begin_step(50)
    for side, rate in sides * 4000:
        (trial.failed if random_.random() < rate else partial(trial.executed, duration_ns=1))(side, 0)
    trial.begin_step(100)
    for _ in range(4000):
        (trial.failed if random_.random() < candidate_errors else partial(trial.executed, duration_ns=1))(
            "candidate", 0
        )
    verdict = trial.verdict()
    assert verdict is not None
    return verdict.decision


@pytest.mark.parametrize(
    ("stable", "candidate", "decision"),
    [(0.05, 0.05, "pass"), (0.05, 0.2, "stop"), (0.0, 0.0, "pass"), (0.0, 0.05, "stop"), (0.5, 0.5, "pass")],
)
def test_at_100_percent_errors_are_compared_with_those_that_the_stable_version_had(
    stable: float, candidate: float, decision: str
) -> None:
    assert trial_at_100(stable, candidate) == decision


@pytest.mark.parametrize(
    ("bad", "count", "decision"),
    [(0, 50, "inconclusive"), (0, 500, "pass"), (25, 500, "inconclusive"), (250, 500, "stop")],
)
def test_a_rollout_that_begins_at_100_percent_is_no_success_before_that_is_sure(
    bad: int, count: int, decision: str
) -> None:
    trial = RolloutTrial(RolloutSettings(4, guards=("errors",)), sticky=False)
    trial.begin_step(100)
    for number in range(count):
        (trial.failed if number < bad else partial(trial.executed, duration_ns=1))("candidate", 0)
    verdict = trial.verdict()
    assert verdict is not None
    assert verdict.decision == decision, verdict
    assert f"{bad} errors in {count} requests" in verdict.sentence


def test_a_step_that_is_paused_and_resumed_again_and_again_takes_no_more_memory() -> None:
    trial = RolloutTrial(RolloutSettings(4), sticky=False)
    trial.begin_step(50)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            trial.begin_step(50)
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_another_server_goes_on_at_the_same_step_with_new_evidence(lab: RolloutLab) -> None:
    keeper = lab.traffic.keeper = Keeper()
    lab.start(steps=[30, 60, 100], guards=["errors"])
    lab.execute(3000)
    assert lab.look()["share"] == 60
    other = RolloutLab(versions=())
    other.traffic.restore(json.loads(keeper.text))
    for version in (3, 4):
        other.models[version] = other.add(version)
    assert {other.send() for _ in range(20)} == {"m:3"}, "nothing before the candidate was looked at"
    status = other.look()
    assert (status["share"], status["guards"]["errors"]["candidate"]) == (60, 0)
    assert other.traffic.kept_versions("m") == {3, 4}
    assert [change["by"] for change in other.traffic.report("m")["history"]][-1] == "a test"


def test_a_state_that_no_server_has_written_is_refused(lab: RolloutLab) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"m": {}},
        {"m": 1},
        {"m": {"rule": None, "rollout": {"phase": "x"}, "history": []}},
    )
    for document in wrong:
        with pytest.raises(InvalidArgument, match="traffic.json in .* is not what the server has written"):
            Traffic(lab.kernel.rules, lab.front.clock, lab.kernel.budget).restore(document)

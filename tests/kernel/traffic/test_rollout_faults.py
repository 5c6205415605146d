"""Rollouts while versions vanish, clocks jump, loads fail, and models count or say what cannot be used."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InternalError
from kernel.observe.metric_rules import MetricKind
from kernel.serving.catalog import ModelState
from kernel.serving.response import Response
from kernel.traffic.rollout_states import MOST_REASON, RolloutSettings
from kernel.traffic.rollout_trial import RolloutTrial
from kernel.traffic.rollouts import LOOK_NS
from tests.kernel.traffic.traffic_lab import Keeper, RolloutLab

if TYPE_CHECKING:
    from collections.abc import Callable

S = 1_000_000_000


@pytest.fixture
def lab() -> RolloutLab:
    return RolloutLab()


# ---- versions that vanish ----------------------------------------------------------------------------


def test_nothing_is_judged_while_the_stable_version_is_gone(lab: RolloutLab) -> None:
    """The candidate then gets all requests, and its errors are not five of ten."""
    lab.start(guards=["errors"])
    lab.look()
    lab.execute(20)
    before = lab.look()["guards"]["errors"]
    lab.catalog.set_state("m", 3, ModelState.UNAVAILABLE, "unloaded")
    lab.execute(60, error=InternalError("both have them"))
    status = lab.look()
    assert (status["phase"], status["share"], status["guards"]["errors"]) == ("step", 50, before)
    lab.execute(60, error=InternalError("both have them"))
    status = lab.look()
    assert status["guards"]["errors"] == before
    assert status["verdict"] == {
        "decision": "inconclusive", "sentence": "version 3 is not READY: there is nothing to compare with",
    }  # fmt: skip
    lab.models[3] = lab.add(3)
    lab.look()
    lab.execute(20)
    after = lab.look()["guards"]["errors"]
    assert after["candidate"] + after["stable"] == before["candidate"] + before["stable"] + 20


def test_a_step_does_not_end_while_the_stable_version_is_gone(lab: RolloutLab) -> None:
    lab.start(guards=["errors"], step_timeout_s=60, every_s=30)
    lab.look()
    lab.execute(3000)
    assert lab.look()["verdict"]["decision"] == "pass"
    lab.catalog.set_state("m", 3, ModelState.UNAVAILABLE, "unloaded")
    for _ in range(60 * S // LOOK_NS):
        lab.front.clock.advance(LOOK_NS)
    status = lab.look()
    assert (status["phase"], status["share"]) == ("paused", 50)
    assert status["reason"] == "inconclusive: version 3 is not READY: there is nothing to compare with"


def test_at_100_percent_nobody_needs_the_stable_version(lab: RolloutLab) -> None:
    lab.start(guards=["errors"], steps=[50, 100])
    lab.look()
    lab.execute(3000)
    assert lab.look()["share"] == 100
    lab.catalog.set_state("m", 3, ModelState.UNAVAILABLE, "unloaded")
    lab.look()
    lab.execute(20)
    assert lab.look()["phase"] == "done"


def test_clients_that_name_the_canary_and_rules_that_lead_to_it_survive_the_end(lab: RolloutLab) -> None:
    lab.rule(weights={"3": 1}, labels={"canary": 4}, rules=[{"header": "x", "to": "canary"}])
    lab.start(guards=["errors"])
    lab.look()
    assert lab.send(model_version="canary") == "m:4"
    lab.traffic.command_rollout("m", "promote", "a test")
    assert lab.send(model_version="canary") == "m:4"
    lab.models[5] = lab.add(5)
    lab.traffic.start_rollout("m", {"to": 5, "steps": [1, 100]}, "a test")
    lab.look()
    assert lab.send({"x": "1"}) == "m:5", "the rule holds for the next candidate"


# ---- time --------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_is_no_hang(lab: RolloutLab) -> None:
    """A server that was stopped for an hour has not seen what the candidate has done."""
    lab.start(hang_s=30)
    lab.look()
    requests = [lab.request() for _ in range(10)]
    for request in requests:
        lab.kernel.submit(request)
    assert lab.models[4].in_flight
    lab.look()
    lab.front.clock.time_ns += 3600 * S
    assert lab.look()["phase"] == "step"
    for request in requests:
        assert not request.finished
        lab.respond(request)


def test_a_stream_that_takes_minutes_is_no_hang_while_it_has_responses() -> None:
    lab = RolloutLab(decoupled=True)
    lab.start(hang_s=1, guards=["errors"], steps=[99])
    lab.look()
    requests = [lab.request(streaming=True) for _ in range(3)]
    for each in requests:
        lab.kernel.submit(each)
    request = next(iter(lab.models[4].live.instance_of))
    for _ in range(3 * S // LOOK_NS):
        request.respond(Response("m", "", "", outputs=[], final=False))
        assert lab.look()["phase"] == "step"
    for _ in range(2 * S // LOOK_NS):
        status = lab.look()
    assert (status["phase"], status["reason"]) == ("aborted", "the candidate has ended no execution for 1 s")


# ---- loads -------------------------------------------------------------------------------------------


class Loads:
    """Loads of candidates, which the test ends."""

    def __init__(self, *, explicit: bool = True) -> None:
        self.explicit = explicit
        self.ended: Callable[[str], None] = lambda _: None

    def load_for_rollout(self, name: str, ended: Callable[[str], None]) -> bool:
        self.ended = ended
        return self.explicit


def failed_before(*, explicit: bool = True) -> tuple[RolloutLab, Loads]:
    """Return a lab in which version 5 could not be loaded, and a rollout to it that has begun."""
    loads = Loads(explicit=explicit)
    lab = RolloutLab(loads=loads)
    lab.catalog.set_state("m", 5, ModelState.UNAVAILABLE, "no weights")
    lab.start(to=5, guards=["errors"])
    return lab, loads


def test_a_version_that_could_not_be_loaded_before_is_tried_again() -> None:
    lab, loads = failed_before()
    assert lab.look()["phase"] == "loading"
    lab.catalog.set_state("m", 5, ModelState.LOADING)
    lab.models[5] = lab.add(5)
    loads.ended("")
    assert (lab.look()["phase"], lab.look()["share"]) == ("step", 50)


@pytest.mark.parametrize(("said", "reason"), [("", "no weights"), ("no folder", "no folder")])
def test_a_load_that_fails_again_ends_the_rollout(said: str, reason: str) -> None:
    lab, loads = failed_before()
    assert lab.look()["phase"] == "loading"
    loads.ended(said)
    status = lab.look()
    assert (status["phase"], status["reason"]) == ("aborted", f"the candidate cannot be loaded: {reason}")


def test_where_a_poll_loads_the_last_failure_counts() -> None:
    lab, _ = failed_before(explicit=False)
    assert lab.look()["reason"] == "the candidate cannot be loaded: no weights"


def test_a_version_that_the_repository_does_not_have_ends_the_rollout() -> None:
    loads = Loads()
    lab = RolloutLab(loads=loads)
    lab.start(to=9, guards=["errors"])
    assert lab.look()["phase"] == "loading"
    loads.ended("")
    assert lab.look()["reason"].endswith("cannot be loaded: the repository has no version 9 of model 'm'")


# ---- what models count and say -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e300, -5.0])
def test_a_counter_that_is_no_count_of_requests_stops_no_look(lab: RolloutLab, value: float) -> None:
    family = lab.models[4].statistics.custom.define("empty_total", "", MetricKind.COUNTER)
    series = lab.models[4].statistics.custom.hold(family, (), ())
    lab.start(guards=["metric:empty_total"])
    lab.look()
    series.value = value
    status = lab.look()
    assert (status["phase"], status["guards"]["metric:empty_total"]["candidate_bad"]) == ("step", 0)


def test_a_reason_with_characters_that_no_file_can_have_is_kept(lab: RolloutLab) -> None:
    keeper = lab.traffic.keeper = Keeper()
    lab.start(to=5, guards=["errors"])
    lab.catalog.set_state("m", 5, ModelState.UNAVAILABLE, "no file '\udcff'" + "x" * 10_000)
    status = lab.look()
    assert status["reason"].startswith("the candidate cannot be loaded: no file '?'x")
    assert len(status["reason"]) == MOST_REASON
    assert json.loads(keeper.text)["m"]["rollout"]["reason"] == status["reason"]


# ---- keys --------------------------------------------------------------------------------------------


def sticky(*, share: int) -> RolloutTrial:
    trial = RolloutTrial(RolloutSettings(4, guards=("errors",)), sticky=True)
    trial.begin_step(share)
    return trial


def test_a_key_counts_once_in_a_step_that_is_paused_and_resumed() -> None:
    trial = sticky(share=50)
    for _ in range(30):
        trial.failed("candidate", 7)
        trial.begin_step(50)
    assert trial.figures()["errors"]["candidate_bad"] == 1
    trial.begin_step(60)
    trial.failed("candidate", 7)
    assert trial.figures()["errors"]["candidate_bad"] == 2


def test_a_key_that_always_fails_counts_once_at_100_percent() -> None:
    trial = sticky(share=100)
    for bucket in range(500):
        trial.executed("candidate", bucket, 1)
    for _ in range(5000):
        trial.failed("candidate", 7)
    verdict = trial.verdict()
    assert verdict is not None
    assert verdict.sentence.startswith("1 errors in 500 requests")


def test_ten_thousand_keys_that_all_fail_on_both_sides_stop_nothing() -> None:
    trial = sticky(share=50)
    for turn in range(3):
        for bucket in range(10_000):
            side: Any = "candidate" if bucket < 5000 else "stable"
            (trial.failed if bucket % 10 == 0 else partial(trial.executed, duration_ns=1))(side, bucket)
        assert trial.figures()["errors"] == {
            "candidate": 5000, "candidate_bad": 500, "stable": 5000, "stable_bad": 500,
        }, turn  # fmt: skip
    verdict = trial.verdict()
    assert verdict is not None
    assert verdict.decision == "pass"


def test_at_100_percent_no_request_is_no_verdict() -> None:
    trial = RolloutTrial(RolloutSettings(4, guards=("errors",)), sticky=False)
    trial.begin_step(50)
    for _ in range(2000):
        trial.executed("candidate", 0, 1)
        trial.executed("stable", 0, 1)
    assert trial.verdict() is not None
    trial.begin_step(100)
    assert trial.verdict() is None, "silence is no success"

"""Rollouts in a kernel whose versions execute nothing by themselves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InternalError, InvalidArgument, RequestCancelled
from kernel.observe.execution_reports import ExecutionTimes
from kernel.serving.batch import Batch
from kernel.serving.catalog import ModelState
from kernel.traffic.control import Traffic
from kernel.traffic.rollout_trial import BASELINE
from kernel.traffic.rollouts import LOOK_NS
from tests.kernel.traffic.traffic_lab import TrafficLab

if TYPE_CHECKING:
    from kernel.errors import ServingError

MS = 1_000_000


class RolloutLab(TrafficLab):
    """Executes requests of both versions in the test."""

    def start(self, **members: Any) -> None:
        members = {"to": 4, "steps": [50, 100], "every_s": 0, "least_requests": 5, **members}
        self.traffic.start_rollout("m", members, "a test")

    def execute(self, count: int, *, ms: float = 1, error: ServingError | None = None, only: int | None = None) -> None:
        """Execute requests of clients; those of version `only`, or of both, are slow or fail as said."""
        for _ in range(count):
            request = self.request()
            self.kernel.submit(request)
            [model] = [model for model in self.catalog.executing_models() if request in model.live.instance_of]
            changed = only is None or model.version == only
            if error is not None and changed:
                request.fail(error)
                continue
            took_ns = round((ms if changed else 1) * MS)
            model.statistics.record_execution(Batch([request]), ExecutionTimes(0, 0, took_ns, took_ns), took_ns, 0)
            self.respond(request)

    def respond(self, request: Any) -> None:
        from kernel.serving.response import Response

        request.respond(Response("m", "", "", outputs=[]))

    def look(self) -> dict[str, Any]:
        self.front.clock.advance(LOOK_NS)
        status = self.traffic.rollouts.status("m")
        assert status is not None
        return status


@pytest.fixture
def lab() -> RolloutLab:
    return RolloutLab()


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


class Keeper:
    def __init__(self) -> None:
        self.text = ""

    def save(self, document: dict[str, Any]) -> None:
        self.text = json.dumps(document)


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
        with pytest.raises(InvalidArgument, match="it is not what the server has written"):
            Traffic(lab.kernel.rules, lab.front.clock).restore(document)

"""When a version that gets copies has the lowest priority, and when it has its own again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kernel.serving.catalog import ModelState
from kernel.traffic.shadow import ShadowParts
from kernel.traffic.shadow_priority import QUIET_NS, TRY_NS
from tests.kernel.traffic.traffic_lab import RULE, ShadowLab

if TYPE_CHECKING:
    from kernel.serving.model import Model


class System:
    """Notes what is asked for; a test lets it refuse."""

    def __init__(self) -> None:
        self.low: set[int] = set()
        self.calls: list[str] = []
        self.ready = True

    def lower(self, model: Model) -> bool:
        self.calls.append(f"lower {model.version}")
        if self.ready:
            self.low.add(model.version)
        return self.ready

    def restore(self, model: Model) -> bool:
        self.calls.append(f"restore {model.version}")
        if self.ready:
            self.low.discard(model.version)
        return self.ready


class PriorityLab(ShadowLab):
    def __init__(self) -> None:
        super().__init__()
        self.system = System()
        self.traffic.shadow_parts = ShadowParts(
            self.kernel.submit_copy, self.front.helpers, self.kernel.budget, self.system
        )
        self.rule(shadow=None)
        self.rule(**RULE)

    def wait(self, ns: int) -> None:
        self.front.clock.advance(ns)


@pytest.fixture
def lab() -> PriorityLab:
    return PriorityLab()


def test_a_version_that_gets_copies_only_has_the_lowest_priority(lab: PriorityLab) -> None:
    assert lab.system.calls == []
    lab.pair(1.0, 1.0)
    lab.pair(1.0, 1.0)
    assert lab.system.calls == ["lower 4"], "once, not for each copy"
    lab.rule(weights={"3": 2})
    lab.pair(1.0, 1.0)
    assert lab.system.calls == ["lower 4"], "nothing has changed for the shadow"
    lab.traffic.reset("m", "a test")
    assert lab.system.low == set()


def test_a_client_ends_it_before_its_request_is_executed(lab: PriorityLab) -> None:
    lab.pair(1.0, 1.0)
    lab.answer(lab.ask(model_version="canary"), 1.0)
    assert lab.system.calls == ["lower 4", "restore 4"]
    lab.wait(QUIET_NS - 1)
    lab.pair(1.0, 1.0)
    assert lab.system.low == set(), "clients may come again"
    lab.wait(1)
    lab.pair(1.0, 1.0)
    assert lab.system.low == {4}


@pytest.mark.parametrize(
    "change",
    [{"weights": {"3": 99, "4": 1}}, {"rules": [{"header": "x", "to": "canary"}]}, {"shadow": None}],
)
def test_a_rule_by_which_clients_may_come_ends_it(lab: PriorityLab, change: dict[str, Any]) -> None:
    lab.pair(1.0, 1.0)
    lab.rule(**change)
    lab.send(model_version="3")
    assert lab.system.low == set()
    lab.wait(QUIET_NS)
    for _ in range(5):
        lab.pair(1.0, 1.0, model_version="3")
    assert lab.system.low == set()


def test_the_steps_of_an_ensemble_are_requests_of_clients(lab: PriorityLab) -> None:
    lab.pair(1.0, 1.0)
    parent = lab.request()
    lab.catalog.set_state("m", 3, ModelState.UNAVAILABLE, "unloaded")
    route = lab.kernel.route("m").rule
    assert route is not None
    assert route.choose_for(lab.request(), parent) is lab.models[4], "the newest one, for lack of another"
    assert lab.system.low == set()


def test_another_model_keeps_its_priority_because_its_clients_do_not_come_by_this_rule(lab: PriorityLab) -> None:
    lab.models[7] = other = lab.add(7, name="other")
    lab.rule(labels={"canary": {"model": "other"}})
    lab.answer(lab.ask(), 1.0)
    [copy] = other.live.instance_of
    lab.answer(copy, 1.0)
    assert lab.report()["pairs"] == 1
    assert lab.system.calls == []


def test_a_system_that_is_not_ready_is_asked_again(lab: PriorityLab) -> None:
    lab.system.ready = False
    lab.pair(1.0, 1.0)
    lab.pair(1.0, 1.0)
    assert lab.system.calls == ["lower 4"], "not before some time has passed"
    lab.system.ready = True
    lab.wait(TRY_NS)
    lab.pair(1.0, 1.0)
    assert lab.system.low == {4}
    lab.system.ready = False
    lab.answer(lab.ask(model_version="4"), 1.0)
    assert lab.system.low == {4}
    lab.system.ready = True
    lab.wait(TRY_NS)
    assert lab.system.low == set(), "no request has to come for that"


def test_a_worker_that_was_started_again_gets_it_too(lab: PriorityLab) -> None:
    lab.pair(1.0, 1.0)
    lab.wait(QUIET_NS)
    lab.models[4].statistics.memory.worker_started("m_4", 4711)
    lab.pair(1.0, 1.0)
    assert lab.system.calls == ["lower 4", "lower 4"]

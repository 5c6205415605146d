"""Rewards for requests by the versions that have executed them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import InvalidArgument
from kernel.traffic.feedback import LEAST_REWARDS, MOST_ID_LENGTH, MOST_REWARDS, Feedback, Reward, Rewards, read_rewards
from kernel.traffic.settings import FeedbackSettings
from shm.blocks import ByteBudget
from tests.kernel.traffic.traffic_lab import TrafficLab

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = ("m", 3)

MINUTE_NS = 60_000_000_000


def test_a_reward_counts_once_for_the_version_that_had_the_request() -> None:
    feedback = Feedback(FeedbackSettings(), ByteBudget(1 << 20))
    feedback.remember("a", VERSION, 0)
    feedback.remember("b", ("m", 4), 0)
    assert feedback.reward([Reward("a", 1.0), Reward("a", 1.0), Reward("c", 1.0), Reward("b", 0.5)], 1) == 2
    assert {version: each.mean for version, each in feedback.by_version().items()} == {VERSION: 1.0, ("m", 4): 0.5}
    assert feedback.unknown == 2


def test_ids_are_bounded_in_number_length_and_age() -> None:
    budget = ByteBudget(1 << 20)
    feedback = Feedback(FeedbackSettings(ids=3, minutes=1), budget)
    for id in ("a", "b", "c", "a", "d", "x" * (MOST_ID_LENGTH + 1)):
        feedback.remember(id, VERSION, 0)
    assert feedback.as_dict()["remembered"] == 3
    assert [feedback.reward([Reward(id, 1)], 0) for id in ("b", "c", "a", "d")] == [0, 1, 1, 1]
    feedback.remember("old", VERSION, 0)
    feedback.remember("new", VERSION, MINUTE_NS)
    assert feedback.reward([Reward("old", 1)], MINUTE_NS + 1) == 0
    feedback.remember("old", VERSION, 0)
    feedback.forget_old(2 * MINUTE_NS + 1)
    assert feedback.as_dict()["remembered"] == 0
    assert budget.used_byte_size == 0


def test_old_ids_are_forgotten_where_nobody_asks_for_the_table() -> None:
    budget = ByteBudget(1 << 20)
    feedback = Feedback(FeedbackSettings(minutes=1), budget)
    for number in range(10):
        feedback.remember(str(number), VERSION, 0)
    for number in range(10, 20):
        feedback.remember(str(number), VERSION, MINUTE_NS + 1)
    assert feedback.as_dict()["remembered"] == 10


def test_ids_count_in_the_memory_budget_and_none_is_remembered_without_room() -> None:
    budget = ByteBudget(1000)
    feedback = Feedback(FeedbackSettings(), budget)
    for id in ("a", "\U0001f600" * 100, "c", "d", "e"):
        feedback.remember(id, VERSION, 0)
    found = feedback.as_dict()
    assert (found["remembered"], found["without_room"]) == (2, 3)
    assert 640 + 240 <= budget.used_byte_size <= 1000, "characters that are not ASCII take four bytes"
    assert feedback.reward([Reward(id, 1) for id in ("a", "c")], 0) == 1
    assert not feedback.forget_some()
    assert budget.used_byte_size == 0


def test_ids_that_no_rule_needs_give_their_memory_back_in_slices() -> None:
    lab = TrafficLab()
    lab.kernel.budget.limit_byte_size = 1 << 30
    budget = lab.kernel.budget
    rule: dict[str, Any] = {"ids": 100_000}
    lab.rule(weights={"3": 1}, feedback=rule)
    route = lab.kernel.rules.by_name["m"]
    for number in range(12_000):
        assert route.choose(lab.request(id=str(number))) is lab.models[3]
    full = budget.used_byte_size
    lab.rule(feedback=None)
    assert 0 < budget.used_byte_size < full, "a slice at once"
    lab.rule(feedback=rule)
    lab.front.clock.advance(1_000_000_000)
    kept = lab.traffic.report("m")["feedback"]["remembered"]
    assert 0 < kept < 12_000, "a rule needs it again"
    lab.rule(feedback={"ids": 10})
    lab.front.clock.advance(1_000_000_000)
    assert budget.used_byte_size == 0
    assert lab.traffic.report("m")["feedback"]["remembered"] == 0


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({}, "expected an object with the 'id'"),
        ({"id": 3, "reward": 1}, "expected an object with the 'id'"),
        ({"id": "a", "reward": "1"}, "Expected `float`"),
        ([{"id": "a", "reward": float("nan")}], "the reward of 'a' must be a number"),
        ([{"id": "a", "reward": 1e300}], "the reward of 'a' must be a number"),
        ([{"id": "a", "reward": 1}] * (MOST_REWARDS + 1), "a message may have 1000 rewards"),
        (7, "expected an object"),
    ],
)
def test_wrong_rewards_are_refused(document: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_rewards(document)


@pytest.mark.parametrize(
    "draw",
    [
        lambda random_: float(random_.random() < 0.3),
        lambda random_: random_.gauss(0.3, 2),
        lambda random_: random_.expovariate(1 / 0.3),
    ],
    ids=["yes or no", "normal", "skewed"],
)
def test_an_interval_holds_at_every_look(draw: Callable[[random.Random], float]) -> None:
    """200 runs of 3,000 rewards, looked at after each: at most 5 % are ever wrong, and chance adds to that."""
    wrong = 0
    for seed in range(200):
        random_, rewards = random.Random(seed), Rewards()
        for _ in range(3000):
            rewards.add(draw(random_))
            half = rewards.half_width()
            if half is not None and abs(rewards.mean - 0.3) > half:
                wrong += 1
                break
    assert wrong <= 16


def test_intervals_get_narrower_and_few_rewards_have_none() -> None:
    random_, rewards = random.Random(3), Rewards()
    for _ in range(LEAST_REWARDS - 1):
        rewards.add(random_.random())
    assert rewards.half_width() is None
    widths = []
    for count in (100, 1000, 10_000):
        while rewards.count < count:
            rewards.add(random_.random())
        widths.append(rewards.half_width() or 0)
    assert widths[0] > widths[1] > widths[2] > 0
    assert widths[1] < 1.7 * 1.96 * (rewards.variance / 1000) ** 0.5


def test_two_versions_are_compared() -> None:
    lab = TrafficLab()
    lab.rule(weights={"3": 1, "4": 1}, feedback={})
    random_ = random.Random(1)
    for number in range(2000):
        version = lab.send(id=str(number))
        reward = float(random_.random() < (0.2 if version == "m:3" else 0.5))
        assert lab.traffic.reward("m", {"id": str(number), "reward": reward}) == {"counted": 1, "unknown": 0}
    assert lab.send() in ("m:3", "m:4"), "a request without an id is served, and not remembered"
    table = lab.traffic.report("m")["feedback"]
    assert table["remembered"] == 0
    first, second = table["versions"]
    assert first["difference"] is None
    low, high = second["difference"]["interval"]
    sign = 1 if second["version"] == 4 else -1
    assert min(low * sign, high * sign) > 0, "version 4 is better"
    assert sorted((row.version, row.count) for row in lab.traffic.rewards()) == sorted(
        (row["version"], row["rewards"]) for row in table["versions"]
    )


def test_rewards_need_a_rule_with_feedback_and_outlive_a_change_of_weights() -> None:
    lab = TrafficLab()
    with pytest.raises(InvalidArgument, match="the traffic rule of model 'm' has no 'feedback'"):
        lab.traffic.reward("m", {"id": "a", "reward": 1})
    lab.rule(weights={"3": 1}, feedback={"ids": 10})
    lab.send(id="a")
    lab.rule(weights={"4": 1})
    assert lab.traffic.reward("m", [{"id": "a", "reward": 1}, {"id": "b", "reward": 1}]) == {
        "counted": 1, "unknown": 1,
    }  # fmt: skip

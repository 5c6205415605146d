"""Which version executes a request of a model with a traffic rule."""

from __future__ import annotations

import math
from collections import Counter
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import ModelNotReady
from kernel.serving.catalog import ModelState
from kernel.serving.prepared import prepare
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from kernel.traffic.route import BUCKETS, bounds, bucket_of, seed_of
from shm.tensor import Tensor
from tests.kernel.traffic.traffic_lab import TrafficLab

LABELS = {"stable": 3, "canary": 4}


@pytest.fixture
def lab() -> TrafficLab:
    return TrafficLab()


def test_weights_share_the_requests(lab: TrafficLab) -> None:
    lab.rule(labels=LABELS, weights={"stable": 90, "canary": 10})
    counts = Counter(lab.send() for _ in range(5000))
    assert counts.keys() == {"m:3", "m:4"}
    assert abs(counts["m:4"] - 500) < 4 * math.sqrt(5000 * 0.1 * 0.9)
    lab.kernel.check()


def test_without_a_rule_the_newest_version_gets_all_requests_and_no_label_is_known(lab: TrafficLab) -> None:
    assert lab.send() == "m:4"
    assert lab.send(model_version="canary").startswith(
        "failed to get model version from specified version string 'canary' (details: stol)"
    ), "Triton's text"


def test_a_label_stands_for_a_version_and_a_number_for_itself(lab: TrafficLab) -> None:
    lab.rule(labels={"old": 3}, weights={"4": 1})
    assert lab.send(model_version="old") == "m:3"
    assert lab.send(model_version="3") == "m:3"
    assert lab.send(model_version="4") == "m:4"
    assert lab.send(model_version="5") == "Request for unknown model: 'm' version 5 is not found"
    assert "(details: stol)" in lab.send(model_version="young")
    assert lab.kernel.model_ready("m", "old")
    assert lab.kernel.served_figures("m", "old").version == 3
    assert lab.catalog.number_of("m", "old") == 3


def test_the_first_rule_that_matches_decides(lab: TrafficLab) -> None:
    lab.rule(
        labels=LABELS,
        weights={"stable": 1},
        rules=[
            {"header": "X-Tenant", "is": ["acme", "initech"], "to": "canary"},
            {"parameter": "debug", "to": "3"},
            {"parameter": "beta", "is": ["true"], "to": "4"},
        ],
    )
    assert lab.send({"x-tenant": "initech"}) == "m:4"
    assert lab.send({"x-tenant": "other"}) == "m:3"
    assert lab.send(parameters={"debug": 1, "beta": True}) == "m:3"
    assert lab.send(parameters={"beta": True}) == "m:4"
    assert lab.send(parameters={"beta": "false"}) == "m:3"
    assert lab.send({"x-tenant": "initech"}, model_version="3") == "m:3", "who names a version gets it"


@pytest.mark.parametrize("key", ["header:X-User", "parameter:user", "request-id"])
def test_an_equal_key_has_an_equal_version(lab: TrafficLab, key: str) -> None:
    lab.rule(labels=LABELS, weights={"stable": 50, "canary": 50}, key=key)
    for number in range(50):
        user = f"user-{number}"
        expected = "m:4" if bucket_of(user, seed_of("m", "")) < 5000 else "m:3"
        assert {lab.send({"x-user": user}, parameters={"user": user}, id=user) for _ in range(3)} == {expected}


def test_more_weight_moves_no_key_back(lab: TrafficLab) -> None:
    users = [f"user-{number}" for number in range(300)]
    before: set[str] = set()
    for weight in (1, 5, 25, 50, 100):
        lab.rule(labels=LABELS, weights={"stable": 100 - weight, "canary": weight}, key="header:x-user")
        now = {user for user in users if lab.send({"x-user": user}) == "m:4"}
        assert before <= now
        before = now
    assert before == set(users)


def test_a_target_that_is_not_ready_counts_as_0(lab: TrafficLab) -> None:
    lab.rule(labels=LABELS, weights={"stable": 50, "canary": 50}, rules=[{"header": "a", "to": "canary"}])
    lab.catalog.set_state("m", 4, ModelState.UNLOADING, "", lab.models[4])
    assert {lab.send({"a": "b"}) for _ in range(20)} == {"m:3"}
    assert lab.send(model_version="canary") == ModelNotReady("m", 4).message
    [stable, canary] = lab.traffic.report("m")["targets"]
    assert (stable["share"], canary["share"]) == (10_000, 0)
    assert canary["trouble"] == ModelNotReady("m", 4).message


def test_if_no_target_is_ready_the_newest_version_gets_the_requests(lab: TrafficLab) -> None:
    lab.rule(weights={"1": 1, "2": 1})
    assert lab.send() == "m:4"


def test_a_new_version_gets_nothing_until_the_rule_names_it(lab: TrafficLab) -> None:
    lab.rule(weights={"3": 1})
    lab.add(9)
    assert {lab.send() for _ in range(20)} == {"m:3"}


def test_a_target_can_be_another_model_of_the_same_signature(lab: TrafficLab) -> None:
    lab.add(1, "small")
    lab.rule(labels={"other": {"model": "small"}}, weights={"3": 1, "other": 1})
    assert {lab.send() for _ in range(50)} == {"m:3", "small:1"}
    assert lab.send(model_version="other") == "small:1"


def test_another_model_of_another_signature_gets_no_requests(lab: TrafficLab) -> None:
    lab.add(1, "large", dims=(2,))
    lab.rule(labels={"other": {"model": "large"}}, weights={"3": 1, "other": 1})
    assert {lab.send() for _ in range(50)} == {"m:3"}
    trouble = [target["trouble"] for target in lab.traffic.report("m")["targets"]]
    assert trouble == ["model 'large' has other inputs than model 'm'", ""]


def test_a_prepared_request_is_drawn_each_time_and_not_checked_again(
    lab: TrafficLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.rule(weights={"3": 1, "4": 1})
    route = lab.kernel.route("m")
    prepared = prepare(lab.request(), route)

    def refuse(*_: object) -> None:
        raise AssertionError("it was checked again")

    monkeypatch.setattr("kernel.serving.kernel.validate", refuse)
    versions = set()
    for _ in range(50):
        request = prepared.with_inputs([Tensor("IN", "FP32", [1], bytes(4))], "", RecordingSink())
        lab.kernel.submit(request, prepared)
        versions |= {number for number, model in lab.models.items() if request in model.live.instance_of}
    assert versions == {3, 4}


def test_a_sequence_stays_where_it_began() -> None:
    lab = TrafficLab(sequences=True)
    lab.rule(labels=LABELS, weights={"stable": 1})
    assert lab.send(correlation_id=7, sequence_start=True) == "m:3"
    lab.rule(labels={"stable": 4, "canary": 4}, weights={"canary": 1})
    assert lab.send(correlation_id=7) == "m:3"
    assert lab.send(correlation_id=7, model_version="stable") == "m:3", "the label has moved, the sequence has not"
    assert lab.send(correlation_id=8, sequence_start=True) == "m:4"
    assert lab.send(correlation_id=7, sequence_start=True) == "m:3", "one version has the sequence, also if it restarts"
    assert lab.send(correlation_id=7, sequence_end=True) == "m:3"
    assert "must specify the START flag" in lab.send(correlation_id=9)


def test_a_rule_for_sequences_and_a_key_of_sequences() -> None:
    lab = TrafficLab(sequences=True)
    lab.rule(weights={"3": 1}, rules=[{"sequence": True, "to": "4"}])
    assert lab.send(correlation_id="s", sequence_start=True) == "m:4"
    lab.rule(weights={"3": 1, "4": 1}, rules=[], key="sequence")
    expected = "m:4" if bucket_of("t", seed_of("m", "")) < 5000 else "m:3"
    for _ in range(3):
        assert lab.send(correlation_id="t", sequence_start=True, sequence_end=True) == expected


def test_requests_for_one_request_see_one_side(lab: TrafficLab) -> None:
    lab.rule(labels=LABELS, weights={"stable": 50, "canary": 50}, rules=[{"header": "beta", "to": "canary"}])
    seen = set()
    for _ in range(30):
        root = Request("ensemble", [], RecordingSink())
        child = Request("step", [], RecordingSink(), parent=root)
        found = {lab.kernel.resolve_for(each, child, "m").version for each in (child, child, root)}
        assert len(found) == 1
        assert lab.kernel.resolve_for(root, root, "m").version in found
        assert lab.kernel.resolve_for(root, root, "m", "3").version == 3, "a step that names a version gets it"
        seen |= found
    assert seen == {3, 4}
    root = lab.request({"beta": "1"})
    assert lab.kernel.resolve_for(root, root, "m").version == 4, "the rules look at the client's request"


def test_counts_say_which_version_got_requests_and_why(lab: TrafficLab) -> None:
    lab.rule(labels=LABELS, weights={"stable": 1}, rules=[{"header": "a", "to": "canary"}], key="header:u")
    for headers in ({}, {"u": "x"}, {"a": "1"}):
        lab.send(headers)
    lab.send(model_version="canary")
    counts = {(each.version, each.reason): each.count for each in lab.traffic.routed()}
    assert counts == {(3, "weight"): 1, (3, "key"): 1, (4, "rule"): 1, (4, "version"): 1}
    lab.rule(weights={"stable": 1, "canary": 1})
    assert {(each.version, each.reason): each.count for each in lab.traffic.routed()} == counts, "they go on"


def test_the_hash_is_the_one_that_the_documents_state() -> None:
    assert bucket_of("user-7", seed_of("resnet", "")) == crc32(b"user-7", crc32(b"resnet\0\0")) % 10_000
    assert bucket_of("user-7", seed_of("resnet", "")) == 23, "a new number would move every key of every server"


def test_keys_fill_the_buckets_evenly() -> None:
    counts = Counter(bucket_of(f"user-{number}", seed_of("m", "")) // 100 for number in range(100_000))
    chi_square = sum((counts[place] - 1000) ** 2 / 1000 for place in range(100))
    assert chi_square < 149, "99 degrees of freedom: chance exceeds it once in 1,000 times"


def test_another_salt_chooses_other_keys() -> None:
    keys = [f"{number:08}" for number in range(100_000)]
    first = {key for key in keys if bucket_of(key, seed_of("m", "a")) < 1000}
    second = {key for key in keys if bucket_of(key, seed_of("m", "b")) < 1000}
    assert 9_000 < len(first) < 11_000
    assert 700 < len(first & second) < 1300, "a tenth of a tenth: the choices are independent"


def test_the_first_target_has_the_highest_buckets() -> None:
    assert bounds([95, 5]) == [BUCKETS, 500]
    assert bounds([80, 15, 5]) == [BUCKETS, 1500, 2000]
    assert bounds([1]) == [BUCKETS]


def test_a_small_weight_has_a_bucket() -> None:
    assert bounds([1_000_000, 1, 1]) == [BUCKETS, 1, 2]


@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 1000))
def test_a_target_that_grows_gives_no_bucket_away(stable: int, weight: int, more: int) -> None:
    assert bounds([stable, weight + more])[1] >= bounds([stable, weight])[1]


@given(st.lists(st.integers(0, 1_000_000), min_size=1, max_size=16).filter(any))
def test_the_bounds_ascend_and_a_weight_of_0_owns_nothing(weights: list[int]) -> None:
    found = bounds(weights)
    begin = 0
    for weight, end in zip(weights[1:], found[1:], strict=True):
        assert begin <= end <= BUCKETS
        assert weight or end == begin
        assert abs((end - begin) - weight * BUCKETS / sum(weights)) <= 16
        begin = end

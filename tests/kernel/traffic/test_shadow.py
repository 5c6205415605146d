"""Shadows in a kernel whose versions execute nothing by themselves."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from kernel.errors import InternalError, InvalidArgument, RequestCancelled
from kernel.serving.catalog import ModelState
from kernel.serving.response import Response
from kernel.testing import model_spec
from kernel.traffic.route import why_not_compared
from kernel.traffic.settings import OutputRule
from kernel.traffic.shadow import LONGEST_WAIT_NS, LOOK_NS, MOST_INPUT_BYTE_SIZE, MOST_KEPT, PARAMETER
from protocols.http.endpoints.traffic import segment_of
from shm.tensor import ClientSpan, RequestedOutput, Tensor
from tests.kernel.traffic.traffic_lab import RULE, ShadowLab, TrafficLab


@pytest.fixture
def lab() -> ShadowLab:
    return ShadowLab()


def test_the_client_has_its_response_before_the_copy_is_submitted(lab: ShadowLab) -> None:
    request = lab.ask(id="x", parameters={"p": 1})
    assert not lab.copies()
    lab.answer(request, 1.0)
    assert len(request.sink.responses) == 1  # type: ignore[attr-defined]  # a RecordingSink
    [copy] = lab.copies()
    assert (copy.id, copy.parameters) == ("x", {"p": 1, PARAMETER: True})
    lab.answer(copy, 1.0)
    report = lab.report()
    assert (report["pairs"], report["different"], report["sampled"], report["dropped"]) == (1, 0, 1, {})
    assert lab.front.helpers.started == [], "equal bytes need no helper"
    assert lab.kernel.budget.used_byte_size == 0
    lab.kernel.check()


def test_whatever_is_wrong_with_the_shadow_the_client_has_its_response(
    lab: ShadowLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    request = lab.ask()
    monkeypatch.setattr(type(lab.shadow), "answered", fail)
    lab.answer(request, 1.0)
    assert len(request.sink.responses) == 1  # type: ignore[attr-defined]  # a RecordingSink
    assert lab.report()["dropped"] == {"an error of the server: RuntimeError": 1}
    assert lab.kernel.budget.used_byte_size == 0


def test_a_response_of_the_cache_is_no_pair(lab: ShadowLab) -> None:
    """The version has not executed the request: one wrong response would count as often as it is asked for."""
    request = lab.ask()
    request.respond(Response("m", "3", "", outputs=[Tensor("OUT", "FP32", [1], bytes(4))], cached=True))
    assert len(request.sink.responses) == 1  # type: ignore[attr-defined]  # a RecordingSink
    assert not lab.copies()
    report = lab.report()
    assert (report["pairs"], report["dropped"]) == (0, {"a response of the cache": 1})
    assert lab.kernel.budget.used_byte_size == 0


def test_a_copy_that_ends_after_its_shadow_leaves_nothing(lab: ShadowLab) -> None:
    lab.answer(lab.ask(), 1.0)
    former, [copy] = lab.shadow, lab.copies()
    lab.rule(**{**RULE, "shadow": {"to": "canary", "percent": 50}})
    assert lab.shadow is not former
    lab.answer(copy, 2.0)
    assert former.report.worst == []
    assert lab.kernel.budget.used_byte_size == 0


def test_a_copy_has_the_inputs_as_the_client_has_sent_them(lab: ShadowLab) -> None:
    content = bytes(range(256)) * 64
    lab.models = {version: lab.add(version, dims=(-1,)) for version in (3, 4)}
    request = lab.request()
    request.inputs = [Tensor("IN", "FP32", [len(content) // 4], content)]
    lab.kernel.submit(request)
    span = request.inputs[0].span
    assert span is not None
    span.lease.region.view(span.offset, span.byte_size)[:4] = b"gone"
    lab.answer(request, 1.0)
    [copy] = lab.copies()
    its = copy.inputs[0].span
    assert its is not None
    assert its.lease.region.view(its.offset, its.byte_size).tobytes() == content
    lab.answer(copy, 1.0)
    assert lab.report()["pairs"] == 1


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (1.0, 1.00001, ""),
        (1.0, 2.0, "values"),
        (1.0, InternalError("no"), "error"),
        (InternalError("no"), 1.0, "error"),
        (InternalError("no"), InternalError("other"), ""),
        (1.0, InvalidArgument("no"), "error"),
    ],
)
def test_pairs_are_compared(lab: ShadowLab, first: Any, second: Any, kind: str) -> None:
    lab.pair(first, second)
    report = lab.report()
    assert (report["pairs"], report["different"]) == (1, int(bool(kind)))
    found = [each["different"] for each in report["outputs"].values()]
    assert found == ([{kind: 1}] if kind else [{}])
    assert len(report["worst"]) == bool(kind)


def test_the_distance_has_quantiles(lab: ShadowLab) -> None:
    for number in range(100):
        lab.pair(1.0, 1.0 if number < 60 else 1.00005 if number < 95 else 2.0)
    [output] = lab.report()["outputs"].values()
    assert output["distance"]["p50"] == 0
    assert 0.3 < output["distance"]["p90"] < 0.6
    assert output["distance"]["p99"] == pytest.approx(9091, rel=0.1)
    assert output["distance"]["largest"] == pytest.approx(9091, rel=0.01)
    assert output["different"] == {"values": 5}


def test_the_worst_requests_are_kept_for_a_replay(lab: ShadowLab) -> None:
    for number in range(MOST_KEPT + 5):
        lab.pair(1.0, 2.0 + number, id=str(number))
    kept = lab.traffic.worst_pairs("m")
    assert [pair.id for pair in kept] == [str(number) for number in range(MOST_KEPT + 4, 4, -1)]
    assert lab.kernel.budget.used_byte_size == sum(pair.byte_size for pair in kept) > 0
    content = segment_of(kept)
    from kernel.records.recording_format import SegmentReader, decode_record

    records = [decode_record(found) for _, found in SegmentReader(memoryview(content), "x").contents()]
    assert len(records) == 2 * MOST_KEPT
    request, response = records[:2]
    assert (request.wanted_version, request.inputs[0].data) == ("4", bytes(4))  # type: ignore[union-attr]
    assert response.outputs[0].data == struct.pack("f", 1)  # type: ignore[union-attr,index]
    lab.rule(shadow=None)
    lab.rule(shadow={"to": "canary", "percent": 50})
    assert lab.kernel.budget.used_byte_size == 0, "another shadow begins anew"
    assert lab.report()["pairs"] == 0


def test_a_part_is_sampled() -> None:
    lab = ShadowLab(shadow={"to": "4", "percent": 10})
    for _ in range(2000):
        lab.pair(1.0, 1.0)
    assert 130 < lab.report()["sampled"] < 270


def test_only_requests_of_other_versions_are_copied(lab: ShadowLab) -> None:
    lab.pair(1.0, 1.0, model_version="4")
    lab.pair(1.0, 1.0, correlation_id=7)
    assert lab.report()["sampled"] == 0
    lab.pair(1.0, 1.0, model_version="3")
    assert lab.report()["sampled"] == 1


def test_a_busy_shadow_gets_one_copy_at_a_time_and_what_is_too_much_is_dropped() -> None:
    lab = ShadowLab(shadow={"to": "canary", "waiting": 3})
    for _ in range(5):
        lab.answer(lab.ask(), 1.0)
    assert len(lab.copies()) == 1
    assert lab.report()["dropped"] == {"too many wait": 2}
    for expected in (1, 1, 0):
        lab.answer(lab.copies()[0], 1.0)
        assert len(lab.copies()) == expected
    assert lab.report()["pairs"] == 3


def test_copies_wait_for_clients_of_the_shadow_and_are_dropped_in_the_end(lab: ShadowLab) -> None:
    client = lab.ask(model_version="4")
    for _ in range(3):
        lab.answer(lab.ask(), 1.0)
    assert not lab.copies()
    lab.answer(client, 1.0)
    lab.front.clock.advance(LOOK_NS)
    assert len(lab.copies()) == 1
    lab.front.clock.advance(LONGEST_WAIT_NS + LOOK_NS)
    assert lab.report()["dropped"] == {"the shadow was not idle in time": 2}
    lab.answer(lab.copies()[0], 1.0)
    assert lab.kernel.budget.used_byte_size == 0


def test_copies_wait_while_clients_wait_for_their_version(lab: ShadowLab) -> None:
    requests = [lab.ask() for _ in range(3)]
    queued = lab.models[3].live.queued
    assert queued
    lab.answer(requests[0], 1.0)
    assert not lab.copies()
    for request in requests[1:]:
        lab.answer(request, 1.0)
    lab.front.clock.advance(LOOK_NS)
    assert len(lab.copies()) == 1


def test_requests_without_a_response_of_the_version_are_no_pairs(lab: ShadowLab) -> None:
    lab.ask().fail(RequestCancelled())
    assert lab.report()["dropped"] == {"no response of the version": 1}


def test_without_memory_nothing_is_copied(lab: ShadowLab) -> None:
    budget = lab.kernel.budget
    budget.add(budget.limit_byte_size - 3)
    lab.answer(lab.ask(), 1.0)
    assert lab.report()["dropped"] == {"no memory": 1}


def test_a_copy_that_the_shadow_does_not_execute_is_no_difference(lab: ShadowLab) -> None:
    lab.answer(lab.ask(), 1.0)
    lab.copies()[0].fail(RequestCancelled())
    lab.kernel.stopping = True
    report = lab.report()
    assert report["dropped"] == {"the shadow did not execute it": 1}
    assert report["pairs"] == 0


def test_many_copies_that_are_refused_at_once_are_dropped_one_after_the_other() -> None:
    lab = ShadowLab(shadow={"to": "canary", "waiting": 1000})
    client = lab.ask(model_version="4")
    for _ in range(1000):
        lab.answer(lab.ask(), 1.0)
    lab.kernel.stopping = True
    lab.answer(client, 1.0)
    lab.front.clock.advance(LOOK_NS)
    assert lab.report()["dropped"] == {"the shadow did not execute it": 1000}


def test_tensors_in_regions_and_large_inputs_are_not_copied(lab: ShadowLab) -> None:
    request = lab.request()
    request.outputs = [RequestedOutput("OUT", client_span=ClientSpan("r", 4))]
    lab.shadow.receive(request, lab.models[3])
    request.outputs = []
    request.inputs = [Tensor("IN", "FP32", [1], bytes(MOST_INPUT_BYTE_SIZE + 1))]
    lab.shadow.receive(request, lab.models[3])
    assert lab.report()["dropped"] == {"tensors in a region of the client": 1, "inputs too large": 1}


def test_weights_may_change_while_the_shadow_counts_and_its_end_drops_what_waits(lab: ShadowLab) -> None:
    lab.pair(1.0, 1.0)
    lab.rule(weights={"3": 2})
    lab.pair(1.0, 1.0)
    assert lab.report()["pairs"] == 2
    busy = lab.ask(model_version="4")
    lab.answer(lab.ask(), 1.0)
    late = lab.ask()
    lab.traffic.reset("m", "a test")
    lab.answer(late, 1.0)
    lab.answer(busy, 1.0)
    report = lab.report()
    assert (report["active"], report["dropped"]) == (False, {"the shadow ended": 2})
    assert lab.kernel.budget.used_byte_size == 0


def test_a_label_that_names_another_version_is_another_shadow(lab: ShadowLab) -> None:
    """Pairs of two versions in one report would say nothing of either."""
    lab.pair(1.0, 2.0)
    waiting, former = lab.ask(), lab.shadow
    lab.models[5] = lab.add(5)
    lab.rule(labels={"canary": 5})
    assert (lab.report()["pairs"], lab.report()["different"]) == (0, 0)
    lab.answer(waiting, 1.0)
    assert former.report.dropped == {"the shadow ended": 1}
    lab.answer(lab.ask(), 1.0)
    assert len(lab.models[5].live.instance_of) == 1


def test_a_shadow_that_is_not_ready_gets_nothing_and_the_report_says_why(lab: ShadowLab) -> None:
    lab.catalog.set_state("m", 4, ModelState.UNAVAILABLE, "unloaded")
    lab.pair(1.0, 1.0)
    assert lab.report()["sampled"] == 0
    assert "'m' version 4 is not at ready state" in lab.report()["trouble"]
    lab.models[4] = lab.add(4)
    lab.pair(1.0, 1.0)
    assert lab.report()["pairs"] == 1


def test_what_cannot_be_compared_is_refused_with_a_reason() -> None:
    assert "is decoupled" in why_not_compared(model_spec("m", decoupled=True), {})
    assert "has no output 'X'" in why_not_compared(model_spec("m"), {"X": OutputRule()})
    assert why_not_compared(model_spec("m"), {"OUT": OutputRule("top1")}) == ""
    lab = TrafficLab(sequences=True)
    lab.rule(**RULE)
    assert "has sequences" in lab.traffic.report("m")["shadow"]["trouble"]


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"shadow": {"to": "x"}}, "'x' in 'shadow' names no target"),
        ({"shadow": {"to": "3", "percent": 0}}, "Expected `float` > 0"),
        ({"shadow": {"to": "3", "percent": 101}}, "Expected `float` <= 100"),
        ({"outputs": {"OUT": "near"}}, "Invalid enum value 'near'"),
        ({"outputs": {"OUT": {"relative": -1}}}, "Expected `float` >= 0"),
    ],
)
def test_wrong_settings_are_refused(lab: ShadowLab, members: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        lab.rule(**members)

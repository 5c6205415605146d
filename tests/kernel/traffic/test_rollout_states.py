"""The states of a rollout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import InvalidArgument
from kernel.traffic.rollout_states import (
    ACTIONS,
    Action,
    Look,
    RolloutSettings,
    RolloutState,
    begun,
    commanded,
    described,
    looked,
    read_rollout,
    restarted,
)
from kernel.traffic.verdicts import GuardVerdict

SETTINGS = RolloutSettings(4, steps=(1, 50, 100), every_s=10, least_requests=30, step_timeout_s=100, load_timeout_s=60)
S = 1_000_000_000
PASS, STOP, UNSURE = (
    GuardVerdict("pass", "all well"),
    GuardVerdict("stop", "9 of 9"),
    GuardVerdict("inconclusive", "too few"),
)


def at_step(step: int = 0, phase: str = "step") -> RolloutState:
    return RolloutState(3, 4, SETTINGS, phase, step)  # type: ignore[arg-type]  # one of the phases


def test_a_rollout_to_the_end() -> None:
    state = begun(SETTINGS, 3, 0, "ann")
    assert (state.phase, state.share, state.active) == ("loading", 0, True)
    assert looked(state, Look(S, ready=False)) is state
    state = looked(state, Look(2 * S))
    shares, now_s = [], 2
    while state.active:
        shares.append(state.share)
        assert looked(state, Look(now_s * S + 9 * S, verdict=PASS, requests=30)) is state, "it is too early"
        now_s += 10
        assert looked(state, Look(now_s * S, verdict=PASS, requests=29)) is state, "there were too few requests"
        assert looked(state, Look(now_s * S, verdict=UNSURE, requests=30)) is state
        state = looked(state, Look(now_s * S, verdict=PASS, requests=30))
    assert shares == [1, 50, 100]
    assert (state.phase, state.share, state.reason) == ("done", 100, "all well")


@pytest.mark.parametrize("phase", ["step", "paused"])
@pytest.mark.parametrize(
    ("look", "reason"),
    [
        (Look(1, trouble="it has died", verdict=PASS), "it has died"),
        (Look(1, verdict=STOP), "9 of 9"),
        (Look(1, ready=False), "the candidate is no longer READY"),
        (Look(1, ready=False, load_error="no file"), "no file"),
    ],
)
def test_what_stops_a_rollout_at_once(phase: str, look: Look, reason: str) -> None:
    state = looked(at_step(1, phase), look)
    assert (state.phase, state.share, state.reason, state.active) == ("aborted", 0, reason, False)


def test_a_candidate_that_cannot_be_loaded_or_takes_too_long_ends_the_rollout() -> None:
    state = begun(SETTINGS, 3, 0, "ann")
    assert looked(state, Look(1, ready=False, load_error="no file")).reason == "the candidate cannot be loaded: no file"
    assert looked(state, Look(59 * S, ready=False)) is state
    assert looked(state, Look(60 * S, ready=False)).reason == "the candidate is not READY after 60 s"


@pytest.mark.parametrize(
    ("look", "reason"),
    [
        (Look(100 * S, verdict=UNSURE, requests=99), "inconclusive: too few"),
        (Look(100 * S), "inconclusive: 0 requests of the candidate, 30 are needed; no response was judged"),
        (
            Look(100 * S, verdict=PASS, requests=1),
            "inconclusive: 1 requests of the candidate, 30 are needed; all well",
        ),
    ],
)
def test_a_step_without_a_verdict_pauses_and_is_no_success(look: Look, reason: str) -> None:
    state = looked(at_step(1), look)
    assert (state.phase, state.share, state.reason) == ("paused", 50, reason)
    assert looked(state, Look(1000 * S, verdict=PASS, requests=99)) is state, "a person decides"


def test_what_people_do() -> None:
    paused = commanded(at_step(1), "pause", 5, "ann")
    assert (paused.phase, paused.share, paused.reason, paused.by) == ("paused", 50, "paused", "ann")
    resumed = commanded(paused, "resume", 9, "bob")
    assert (resumed.phase, resumed.step, resumed.since_ns) == ("step", 1, 9)
    assert looked(resumed, Look(10, verdict=STOP)).by == "", "the server has done that"
    done = commanded(resumed, "promote", 10, "ann")
    assert (done.phase, done.share) == ("done", 100)
    assert commanded(done, "abort", 11, "ann").share == 0, "the former version comes back"


def test_what_a_state_does_not_allow_is_an_error() -> None:
    for state, action in (
        (at_step(0, "paused"), "pause"), (at_step(), "resume"), (at_step(0, "loading"), "promote"),
        (at_step(0, "aborted"), "abort"), (at_step(0, "done"), "pause"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=f"a rollout that is .* cannot {action}"):
            commanded(state, action, 0, "ann")  # type: ignore[arg-type]  # one of the actions


def test_a_restart_goes_on_with_the_same_step_and_never_promotes() -> None:
    state = restarted(at_step(1), 7)
    assert (state.phase, state.share, state.step) == ("loading", 0, 1)
    assert looked(state, Look(8)).share == 50
    state = restarted(at_step(1, "paused"), 7)
    assert (state.phase, state.share) == ("loading", 0), "no server has the candidate when it starts"
    assert looked(state, Look(8, ready=False)) is state
    state = looked(state, Look(9))
    assert (state.phase, state.share, state.step) == ("paused", 50, 1), "a person decides, as before the restart"
    assert restarted(at_step(0, "aborted"), 7).phase == "aborted"


EVENTS = st.one_of(
    st.builds(
        Look,
        st.just(0),
        st.booleans(),
        st.sampled_from(["", "", "error"]),
        st.sampled_from(["", "", "dead"]),
        st.sampled_from([None, PASS, STOP, UNSURE]),
        st.integers(0, 60),
    ),
    st.sampled_from(ACTIONS),
)


@given(st.lists(st.tuples(st.integers(0, 40), EVENTS), max_size=40))
def test_any_events_keep_the_rules(events: list[tuple[int, Look | Action]]) -> None:
    state, now_ns = begun(SETTINGS, 3, 0, "ann"), 0
    for passed_s, event in events:
        now_ns += passed_s * S
        before = state
        try:
            if isinstance(event, Look):
                state = looked(state, Look(now_ns, *(getattr(event, each) for each in Look.__struct_fields__[1:])))
            else:
                state = commanded(state, event, now_ns, "ann")
        except InvalidArgument:
            continue
        assert 0 <= state.share <= 100
        assert described(state)
        if state is not before:
            assert state.reason, "no transition without a reason"
        if state.share > before.share and isinstance(event, Look):
            assert event.ready
            assert event.verdict is PASS or before.phase == "loading"
        if state.active:
            assert commanded(state, "abort", now_ns, "ann").share == 0, "abort is always possible"


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({}, "missing required field `to`"),
        ({"to": 4, "steps": [5, 5]}, "the steps must ascend"),
        ({"to": 4, "steps": []}, "length >= 1"),
        ({"to": 4, "steps": [101]}, "<= 100"),
        ({"to": 4, "steps": [100]}, "a rollout that begins with 100 % has nothing to compare with"),
        (
            {"to": 4, "guards": ["memory"]},
            "'memory' is no guard: expected one of errors, latency, outputs, metric:NAME",
        ),
        ({"to": 4, "guards": []}, "needs one or more different guards"),
        ({"to": 4, "guards": ["errors", "errors"]}, "needs one or more different guards"),
        ({"to": 4, "key": "x"}, "'x' is no key"),
        ({"to": 4, "stable": 4}, "cannot be both"),
        ({"to": 4, "evry": 1}, "unknown field `evry`"),
        ({"to": "4"}, "Expected `int`"),
        ({"to": 4, "slow_ms": float("inf")}, "slow_ms"),
        ({"to": 4, "every_s": float("nan")}, "every_s"),
        ({"to": 4, "differences": float("nan")}, "differences"),
    ],
)
def test_a_wrong_rollout_is_refused(document: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        read_rollout(document)

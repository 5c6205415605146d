"""The states of a rollout, and what leads from one to the next. Pure: events carry times and verdicts.

loading -> step 0 -> step 1 ... -> done
a step can be paused, and everything before `done` can be aborted; `done` can be aborted too, which brings the
former version back
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kernel.errors import InvalidArgument
from kernel.traffic.rollouts.settings import RolloutSettings  # noqa: TC001 - msgspec reads it
from kernel.traffic.verdicts import GuardVerdict  # noqa: TC001 - as above

Phase = Literal["loading", "step", "paused", "done", "aborted"]
Action = Literal["pause", "resume", "promote", "abort"]

ACTIONS: tuple[Action, ...] = ("pause", "resume", "promote", "abort")


class RolloutState(msgspec.Struct, frozen=True):
    """Where a rollout is."""

    stable: int
    candidate: int
    settings: RolloutSettings
    phase: Phase = "loading"
    #: The index of the step, in `step` and `paused`.
    step: int = 0
    #: When the phase or step began, in monotonic nanoseconds.
    since_ns: int = 0
    #: Why it is where it is, with numbers.
    reason: str = ""

    @property
    def active(self) -> bool:
        """Whether the candidate is on trial."""
        return self.phase in ("loading", "step", "paused")

    @property
    def share(self) -> int:
        """Percent of the requests that the candidate gets."""
        if self.phase in ("step", "paused"):
            return self.settings.steps[self.step]
        return 100 if self.phase == "done" else 0


class Look(msgspec.Struct, frozen=True):
    """What is seen at one time."""

    now_ns: int
    #: Whether the candidate is READY, and why it cannot be loaded.
    ready: bool = True
    load_error: str = ""
    #: Why the candidate must be stopped without statistics; empty if nothing is wrong.
    trouble: str = ""
    #: What the guards say; None before the first event.
    verdict: GuardVerdict | None = None
    #: Requests of the candidate in this step.
    requests: int = 0


def begun(settings: RolloutSettings, stable: int, now_ns: int, by: str) -> RolloutState:
    """Return the first state of a rollout."""
    return RolloutState(stable, settings.to, settings, since_ns=now_ns, reason=f"started by {by}")


def looked(state: RolloutState, look: Look) -> RolloutState:
    """Return the state after a look; the same object if nothing changes."""
    if state.phase == "loading":
        return _loading(state, look)
    if state.phase not in ("step", "paused"):
        return state
    if look.trouble:
        return _aborted(state, look.now_ns, look.trouble)
    if not look.ready:
        return _aborted(state, look.now_ns, look.load_error or "the candidate is no longer READY")
    if look.verdict is not None and look.verdict.decision == "stop":
        return _aborted(state, look.now_ns, look.verdict.sentence)
    if state.phase == "paused":
        return state
    elapsed_ns, settings = look.now_ns - state.since_ns, state.settings
    enough = elapsed_ns >= settings.every_s * 1e9 and look.requests >= settings.least_requests
    if enough and look.verdict is not None and look.verdict.decision == "pass":
        return _next(state, look.now_ns, look.verdict.sentence)
    if elapsed_ns >= max(settings.step_timeout_s, settings.every_s) * 1e9:
        why = "no response was judged" if look.verdict is None else look.verdict.sentence
        if look.requests < settings.least_requests:
            why = f"{look.requests} requests of the candidate, {settings.least_requests} are needed; {why}"
        return _at(state, "paused", look.now_ns, f"inconclusive: {why}")
    return state


def commanded(state: RolloutState, action: Action, now_ns: int, by: str) -> RolloutState:
    """Return the state after a person's command. Raises `InvalidArgument` if the state does not allow it."""
    if action == "pause" and state.phase == "step":
        return _at(state, "paused", now_ns, f"paused by {by}")
    if action == "resume" and state.phase == "paused":
        return _at(state, "step", now_ns, f"resumed by {by}")
    if action == "promote" and state.phase in ("step", "paused"):
        return _at(state, "done", now_ns, f"promoted by {by}")
    if action == "abort" and state.phase != "aborted":
        return _aborted(state, now_ns, f"aborted by {by}")
    raise InvalidArgument(f"a rollout that is {described(state)} cannot {action}")


def restarted(state: RolloutState, now_ns: int) -> RolloutState:
    """Return the state with which a new server goes on: the same step, with new evidence."""
    if state.phase == "step":
        return _at(state, "loading", now_ns, "the server was started again", step=state.step)
    return msgspec.structs.replace(state, since_ns=now_ns)


def described(state: RolloutState) -> str:
    """Return the phase in words."""
    if state.phase in ("step", "paused"):
        verb = "at" if state.phase == "step" else "paused at"
        return f"{verb} step {state.step + 1} of {len(state.settings.steps)} ({state.share} %)"
    return state.phase


def _loading(state: RolloutState, look: Look) -> RolloutState:
    if look.load_error:
        return _aborted(state, look.now_ns, f"the candidate cannot be loaded: {look.load_error}")
    if look.ready:
        return _at(state, "step", look.now_ns, "the candidate is READY", step=state.step)
    if look.now_ns - state.since_ns >= state.settings.load_timeout_s * 1e9:
        return _aborted(state, look.now_ns, f"the candidate is not READY after {state.settings.load_timeout_s:g} s")
    return state


def _next(state: RolloutState, now_ns: int, reason: str) -> RolloutState:
    if state.step + 1 < len(state.settings.steps):
        return _at(state, "step", now_ns, reason, step=state.step + 1)
    return _at(state, "done", now_ns, reason)


def _aborted(state: RolloutState, now_ns: int, reason: str) -> RolloutState:
    return _at(state, "aborted", now_ns, reason)


def _at(state: RolloutState, phase: Phase, now_ns: int, reason: str, step: int | None = None) -> RolloutState:
    return msgspec.structs.replace(
        state, phase=phase, since_ns=now_ns, reason=reason, step=state.step if step is None else step
    )

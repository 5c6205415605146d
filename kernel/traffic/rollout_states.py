"""The plan of a rollout, its states, and what leads from one to the next. Pure: events carry times and verdicts.

loading -> step 0 -> step 1 ... -> done
a step can be paused, and everything before `done` can be aborted; `done` can be aborted too, which brings the
former version back

The plan is the body of `POST /v2/models/M/rollout`, with its defaults.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from kernel.errors import InvalidArgument
from kernel.traffic.settings import is_key
from kernel.traffic.verdicts import GuardVerdict  # noqa: TC001 - as above

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Percent of the requests, ascending.
STEPS = (1, 5, 25, 50, 100)

#: The most characters of the reason of a state.
MOST_REASON = 4000

_Version = Annotated[int, msgspec.Meta(ge=0)]

_Steps = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=100)], ...], msgspec.Meta(min_length=1, max_length=50)]

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=30 * 24 * 3600)]


class RolloutSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checked rollout."""

    #: The version that is to get all requests.
    to: _Version
    #: The version that has them; None: the one with the largest share.
    stable: _Version | None = None
    steps: _Steps = STEPS
    #: The least time of a step.
    every_s: _Seconds = 600.0
    #: The least number of requests of the candidate in a step.
    least_requests: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)] = 300
    #: How long a step may last without a verdict; then the rollout pauses.
    step_timeout_s: _Seconds = 7200.0
    #: How long the candidate may take to become READY.
    load_timeout_s: _Seconds = 600.0
    #: How long the candidate may execute without an end of any execution.
    hang_s: Annotated[float, msgspec.Meta(gt=0, le=24 * 3600)] = 30.0
    guards: Annotated[tuple[str, ...], msgspec.Meta(max_length=8)] = ("errors", "latency")
    #: For the guard `outputs`: percent of the requests of the stable version that the candidate gets a copy of, and
    #: percent of the pairs of outputs that may differ.
    shadow_percent: Annotated[float, msgspec.Meta(gt=0, le=100)] = 100.0
    differences: Annotated[float, msgspec.Meta(gt=0, lt=100)] = 0.1
    #: Slower responses count for the guard `latency`, in milliseconds of execution; None: the 99 % quantile of the
    #: stable version, found at the begin.
    slow_ms: Annotated[float, msgspec.Meta(gt=0, le=24 * 3600 * 1000)] | None = None
    #: As in `TrafficSettings`; None for the key of the model's traffic rule.
    key: str | None = None


#: The guards that there are.
GUARD_NAMES = ("errors", "latency", "outputs")

#: A counter of the model that counts bad events, at most one for a request.
METRIC_GUARD = re.compile(r"metric:[a-zA-Z_:][a-zA-Z0-9_:]{0,255}")


def read_defaults(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that a model's rule sets for its rollouts, without `automatic`. Raises `InvalidArgument`."""
    members = {name: value for name, value in document.items() if name != "automatic"}
    if not isinstance(document.get("automatic", False), bool):
        raise InvalidArgument("'automatic' in 'rollout' must be true or false")
    for name in ("to", "stable"):
        if name in members:
            raise InvalidArgument(f"'{name}' cannot be in 'rollout': each rollout has its own versions")
    try:
        read_rollout({"to": 1, **members})
    except InvalidArgument as error:
        raise InvalidArgument(f"'rollout' is wrong: {error.message}") from None
    return members


def read_rollout(document: Mapping[str, Any]) -> RolloutSettings:
    """Return the rollout that `document` describes. Raises `InvalidArgument` with what was expected."""
    try:
        settings = msgspec.convert(document, RolloutSettings)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error)) from None
    if any(later <= earlier for earlier, later in zip(settings.steps, settings.steps[1:], strict=False)):
        raise InvalidArgument(f"the steps must ascend, and are {list(settings.steps)}")
    if settings.steps[0] == 100 and settings.guards != ("errors",):
        raise InvalidArgument(
            "a rollout that begins with 100 % has nothing to compare with: give it a smaller step first, or only the "
            "guard 'errors'"
        )
    for name in settings.guards:
        if name not in GUARD_NAMES and METRIC_GUARD.fullmatch(name) is None:
            raise InvalidArgument(f"'{name}' is no guard: expected one of {', '.join(GUARD_NAMES)}, metric:NAME")
    if "outputs" in settings.guards and any(METRIC_GUARD.fullmatch(name) for name in settings.guards):
        raise InvalidArgument(
            "a guard 'metric:NAME' is not possible with 'outputs': copies of requests count in the metrics of a model"
        )
    if not settings.guards or len(set(settings.guards)) < len(settings.guards):
        raise InvalidArgument(f"a rollout needs one or more different guards: {', '.join(GUARD_NAMES)}")
    if settings.key is not None and not is_key(settings.key):
        raise InvalidArgument(
            f"'{settings.key}' is no key: expected header:NAME, parameter:NAME, request-id or sequence"
        )
    if settings.stable == settings.to:
        raise InvalidArgument(f"version {settings.to} cannot be both the stable version and the candidate")
    return settings


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
    #: Why it is where it is, with numbers. Everybody may read it.
    reason: str = ""
    #: Who has done that, where a person has: only for those who may administer the server.
    by: str = ""
    #: In `loading`: whether the step is paused as soon as the candidate is READY, as it was before a restart.
    pauses: bool = False

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
    return RolloutState(stable, settings.to, settings, since_ns=now_ns, reason="started", by=by)


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
        return _at(state, "paused", now_ns, "paused", by=by)
    if action == "resume" and state.phase == "paused":
        return _at(state, "step", now_ns, "resumed", by=by)
    if action == "promote" and state.phase in ("step", "paused"):
        return _at(state, "done", now_ns, "promoted", by=by)
    if action == "abort" and state.phase != "aborted":
        return _at(state, "aborted", now_ns, "aborted", by=by)
    raise InvalidArgument(f"a rollout that is {described(state)} cannot {action}")


def restarted(state: RolloutState, now_ns: int) -> RolloutState:
    """Return the state with which a new server goes on: the same step, with new evidence.

    The candidate is loaded first, also for a step that was paused.
    """
    if state.phase in ("step", "paused"):
        pauses = state.phase == "paused"
        return msgspec.structs.replace(_at(state, "loading", now_ns, "the server was started again"), pauses=pauses)
    return msgspec.structs.replace(state, since_ns=now_ns)


def described(state: RolloutState) -> str:
    """Return the phase in words."""
    if state.phase in ("step", "paused"):
        verb = "at" if state.phase == "step" else "paused at"
        return f"{verb} step {state.step + 1} of {len(state.settings.steps)} ({state.share} %)"
    return state.phase


def reason_text(reason: str, by: str) -> str:
    """Return why a rollout is in its state. `by` is who has brought it there; "" if it is nobody, or is not shown."""
    return f"{reason} by {by}".lstrip() if by else reason


def _loading(state: RolloutState, look: Look) -> RolloutState:
    if look.load_error:
        return _aborted(state, look.now_ns, f"the candidate cannot be loaded: {look.load_error}")
    if look.ready:
        if state.pauses:
            return _at(state, "paused", look.now_ns, "paused before the server was started again")
        return _at(state, "step", look.now_ns, "the candidate is READY")
    if look.now_ns - state.since_ns >= state.settings.load_timeout_s * 1e9:
        return _aborted(state, look.now_ns, f"the candidate is not READY after {state.settings.load_timeout_s:g} s")
    return state


def _next(state: RolloutState, now_ns: int, reason: str) -> RolloutState:
    if state.step + 1 < len(state.settings.steps):
        return _at(state, "step", now_ns, reason, step=state.step + 1)
    return _at(state, "done", now_ns, reason)


def _aborted(state: RolloutState, now_ns: int, reason: str) -> RolloutState:
    return _at(state, "aborted", now_ns, reason)


def _at(
    state: RolloutState, phase: Phase, now_ns: int, reason: str, *, step: int | None = None, by: str = ""
) -> RolloutState:
    # A reason may be what a model has raised: of any length, with characters that no file can have.
    reason = reason[:MOST_REASON].encode(errors="replace").decode()
    return msgspec.structs.replace(
        state, phase=phase, since_ns=now_ns, reason=reason, step=state.step if step is None else step, by=by,
        pauses=False,
    )  # fmt: skip

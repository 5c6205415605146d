"""Runs the rollouts: looks at the candidates several times a second, sets shares, keeps what has happened."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.errors import InvalidArgument, ServingError, Unavailable
from kernel.observe.metric_rules import MetricKind
from kernel.serving.catalog import UNLOADED, ModelState
from kernel.traffic.rollout_states import (
    ACTIONS,
    Action,
    Look,
    RolloutState,
    begun,
    commanded,
    described,
    looked,
    read_defaults,
    read_rollout,
    reason_text,
    restarted,
)
from kernel.traffic.rollout_trial import RolloutTrial, SideObserver
from kernel.traffic.route import why_not_compared
from kernel.traffic.settings import ShadowSettings
from kernel.traffic.verdicts import GuardVerdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.loop.clock import Alarm, Clock
    from kernel.serving.catalog import Catalog, VersionEntry
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.traffic.rollout_trial import Side
    from kernel.traffic.settings import TrafficSettings

logger = logging.getLogger(__name__)

#: How often the candidates are looked at.
LOOK_NS = 200_000_000

#: Time counts for a candidate that hangs up to this between two looks, in nanoseconds.
_MOST_PASSED_NS = 1_000_000_000

#: How many requests of a version that cannot execute them fail in one piece of work, and the time between two.
_FAILED_AT_ONCE = 64

_FAIL_NS = 2_000_000

#: A candidate whose workers have died so often is stopped.
_DEATHS = 2


class RuleSetter(Protocol):
    """What a rollout does to the traffic rule of a model. Implemented by `kernel.traffic.control.Traffic`."""

    def rule_of(self, name: str) -> TrafficSettings:
        """Return the rule that a model has. Raises `ServingError` for an unknown model."""

    def use_for_rollout(self, name: str, settings: TrafficSettings, by: str) -> None:
        """Use a rule from now on, and keep `rollout_document` with it."""


class ModelLoads(Protocol):
    """Loads a candidate. Implemented by `kernel.repository.lifecycle.Lifecycle`."""

    def load_for_rollout(self, name: str, ended: Callable[[str], None]) -> bool:
        """Load new versions of a model if clients decide what is loaded. Else return False: the next poll loads them.

        `ended` is called at the end, with the reason if the load has failed, else with "".
        """


class _Rollout:
    """A rollout of one model."""

    def __init__(self, state: RolloutState, *, sticky: bool) -> None:
        self.state = state
        self.trial = RolloutTrial(state.settings, sticky=sticky)
        self.load_error = ""
        #: The versions that are observed.
        self.models: tuple[Model | None, Model | None] = (None, None)
        self.deaths = self.timeouts = 0
        #: The generation of the catalog in which both versions get their shares; -1 while one of them cannot.
        self.comparable = -1
        #: How many executions the candidate has ended, how many responses its running requests have, and how long
        #: neither number has changed while it had requests.
        self.progress, self.without_progress_ns = (-1, 0), 0
        #: When it was looked at.
        self.looked_ns = 0
        #: The failed load before the rollout, while the candidate is loaded again.
        self.former_failure: VersionEntry | None = None


class Rollouts:
    """The rollouts of all models. At most one of a model runs."""

    def __init__(self, rules: RuleSetter, catalog: Catalog, clock: Clock, loads: ModelLoads | None = None) -> None:
        self._rules = rules
        self._catalog = catalog
        self._clock = clock
        self._loads = loads
        self._rollouts: dict[str, _Rollout] = {}
        #: Made when it is first needed.
        self._alarm: Alarm | None = None
        #: Requests of candidates that cannot execute them, which fail soon, whatever becomes of their rollouts.
        self._to_fail: deque[Request] = deque()
        self._failing: Alarm | None = None

    # ---- what people do ------------------------------------------------------------------------------

    def start(self, name: str, document: dict[str, Any], by: str) -> None:
        """Begin a rollout. Raises `ServingError`."""
        if self.is_active(name):
            raise InvalidArgument(f"a rollout of model '{name}' is {described(self._rollouts[name].state)} already")
        rule = self._rules.rule_of(name)
        settings = read_rollout({**read_defaults(rule.rollout), **document})
        stable = settings.stable if settings.stable is not None else self._stable_of(name, rule, settings.to)
        if stable == settings.to:
            raise InvalidArgument(f"version {stable} has the traffic of model '{name}' already")
        sticky = bool(rule.key if settings.key is None else settings.key)
        if sticky and any(guard.startswith("metric:") for guard in settings.guards):
            raise InvalidArgument(
                "a guard 'metric:NAME' is not possible with a key: requests with equal keys are alike, and a counter "
                "does not say whose they are"
            )
        spec = self._catalog.resolve(name, str(stable)).spec
        if "outputs" in settings.guards and (why := why_not_compared(spec, rule.outputs)):
            raise InvalidArgument(f"the guard 'outputs' is not possible: {why}")
        state = begun(msgspec.structs.replace(settings, stable=stable), stable, self._clock.now_ns(), by)
        self._rollouts[name] = _Rollout(state, sticky=sticky)
        self._enter(name, by)
        if self._candidate(name, state) is None and self._loads is not None:
            self._load(name, self._rollouts[name], self._loads)
        self._look(name)

    def _load(self, name: str, rollout: _Rollout, loads: ModelLoads) -> None:
        """Load the candidate. What its last load has said counts only if this one changes nothing."""
        former = self._catalog.entry(name, rollout.state.candidate)
        if former is not None and former.state is ModelState.LOADING:
            return
        rollout.former_failure = former

        def ended(reason: str) -> None:
            rollout.former_failure = None
            if not reason and self._catalog.entry(name, rollout.state.candidate) is None:
                reason = f"the repository has no version {rollout.state.candidate} of model '{name}'"
            rollout.load_error = reason

        if not loads.load_for_rollout(name, ended):
            rollout.former_failure = None

    def command(self, name: str, action: str, by: str) -> None:
        """Pause, resume, promote or abort a rollout. Raises `InvalidArgument`."""
        rollout = self._rollouts.get(name)
        if rollout is None:
            raise InvalidArgument(f"model '{name}' has no rollout")
        known: dict[str, Action] = {each: each for each in ACTIONS}
        rollout.state = commanded(rollout.state, known[action], self._clock.now_ns(), by)
        self._enter(name, by)

    def status(self, name: str) -> dict[str, Any] | None:
        """Return the state of the last rollout of a model for JSON; None if it had none."""
        rollout = self._rollouts.get(name)
        if rollout is None:
            return None
        state, verdict = rollout.state, _verdict(rollout)
        return {
            "phase": state.phase,
            "described": described(state),
            "stable": state.stable,
            "candidate": state.candidate,
            "share": state.share,
            "step": state.step + 1,
            "steps": list(state.settings.steps),
            "seconds_in_phase": round((self._clock.now_ns() - state.since_ns) / 1e9, 1),
            "reason": state.reason,
            "by": state.by,
            "guards": rollout.trial.figures(),
            "slow_ms": None if rollout.trial.slow_ns is None else rollout.trial.slow_ns / 1e6,
            "verdict": None if verdict is None else msgspec.to_builtins(verdict),
        }

    def is_active(self, name: str) -> bool:
        """Whether a rollout of a model decides about its traffic rule."""
        rollout = self._rollouts.get(name)
        return rollout is not None and rollout.state.active

    def states(self) -> dict[str, RolloutState]:
        """Return the states of all rollouts, by model."""
        return {name: rollout.state for name, rollout in self._rollouts.items()}

    def figures(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the counts of the guards, by model."""
        return {name: rollout.trial.figures() for name, rollout in self._rollouts.items()}

    def due(self, name: str, rule: TrafficSettings) -> int | None:
        """Return the newest version that is READY, if its rollout is to begin by itself; None if none is.

        One that was stopped is not tried again.
        """
        rollout = self._rollouts.get(name)
        if rollout is not None and rollout.state.active:
            return None
        newest = max((model.version for model in self._catalog.ready_models(name)), default=-1)
        if rollout is not None and rollout.state.candidate >= newest:
            return None
        try:
            stable = self._stable_of(name, rule, newest)
        except ServingError:
            return None
        return newest if newest > stable else None

    def compared(self, name: str, bucket: int, *, differs: bool) -> None:
        """The shadow of a model has compared a pair of outputs."""
        rollout = self._rollouts.get(name)
        if rollout is not None and rollout.state.active:
            rollout.trial.compared(bucket, differs=differs)

    # ---- a restart -----------------------------------------------------------------------------------

    def document(self, name: str) -> Any:
        """Return the state of a rollout, which `restore` reads in another server; None if there is none."""
        rollout = self._rollouts.get(name)
        return None if rollout is None else msgspec.to_builtins(rollout.state)

    def restore(self, name: str, document: Any) -> None:
        """Go on with a rollout of an earlier server. Raises `msgspec.ValidationError`."""
        state = restarted(msgspec.convert(document, RolloutState), self._clock.now_ns())
        key = state.settings.key
        rule = self._rules.rule_of(name)
        self._rollouts[name] = _Rollout(state, sticky=bool(rule.key if key is None else key))
        if state.active:
            self._enter(name, "the start of the server")

    # ---- looks ---------------------------------------------------------------------------------------

    def _ring(self) -> None:
        try:
            for name in list(self._rollouts):
                self._look(name)
        finally:  # even if one rollout fails, all are looked at again
            self._set_alarm()

    def _set_alarm(self) -> None:
        if any(each.state.active for each in self._rollouts.values()):
            if self._alarm is None:
                self._alarm = self._clock.alarm(self._ring)
            self._alarm.set(self._clock.now_ns() + LOOK_NS)

    def _look(self, name: str) -> None:
        """See how a candidate does, and do what follows."""
        rollout = self._rollouts[name]
        if not rollout.state.active:
            return
        state = rollout.state
        candidate, now_ns = self._candidate(name, state), self._clock.now_ns()
        self._observe(name, rollout, candidate)
        self._read_metrics(rollout)
        hangs = candidate is not None and self._hangs(rollout, candidate, now_ns)
        trouble = ""
        if candidate is not None:
            trouble = self._trouble(rollout, candidate)
            if hangs:
                trouble = f"the candidate has ended no execution for {state.settings.hang_s:g} s"
        look = Look(
            now_ns, candidate is not None, rollout.load_error or self._load_error(name, state), trouble,
            _verdict(rollout), rollout.trial.requests,
        )  # fmt: skip
        after = looked(state, look)
        if after is state:
            return
        rollout.state = after
        self._enter(name, "the server")
        if trouble and candidate is not None and not after.active:  # it may never execute them
            self._to_fail.extend(candidate.live.instance_of)
            self._fail_some()

    def _fail_some(self) -> None:
        """Fail requests that may never be executed, and go on soon if there are more."""
        for _ in range(min(_FAILED_AT_ONCE, len(self._to_fail))):
            _give_up(self._to_fail.popleft())
        if self._to_fail:
            if self._failing is None:
                self._failing = self._clock.alarm(self._fail_some)
            self._failing.set(self._clock.now_ns() + _FAIL_NS)

    def _candidate(self, name: str, state: RolloutState) -> Model | None:
        try:
            return self._catalog.resolve(name, str(state.candidate))
        except ServingError:
            return None

    def _load_error(self, name: str, state: RolloutState) -> str:
        entry = self._catalog.entry(name, state.candidate)
        if entry is None or entry.state is not ModelState.UNAVAILABLE or entry.reason == UNLOADED:
            return ""
        if entry is self._rollouts[name].former_failure:
            return ""
        return entry.reason

    def _trouble(self, rollout: _Rollout, candidate: Model) -> str:
        statistics = candidate.statistics
        if (deaths := statistics.workers_lost - rollout.deaths) >= _DEATHS:
            return f"workers of the candidate have died {deaths} times"
        if statistics.execution_timeouts > rollout.timeouts:
            return "an execution of the candidate took longer than its timeout"
        if not candidate.ready:
            return f"no instance of the candidate can execute: {candidate.trouble or 'its worker has died'}"
        return ""

    def _hangs(self, rollout: _Rollout, candidate: Model, now_ns: int) -> bool:
        statistics = candidate.statistics
        responses = sum(each.response_count for each in candidate.live.instance_of) if statistics.decoupled else 0
        progress = (statistics.execution_count + statistics.fail.count, responses)  # a stream may take minutes
        passed_ns, rollout.looked_ns = now_ns - rollout.looked_ns, now_ns
        if progress != rollout.progress or not candidate.in_flight:
            rollout.progress, rollout.without_progress_ns = progress, 0
            return False
        # A server that was stopped itself, or whose clock has jumped, has not seen what the candidate has done.
        rollout.without_progress_ns += min(passed_ns, _MOST_PASSED_NS)
        return rollout.without_progress_ns >= rollout.state.settings.hang_s * 1e9

    def _observe(self, name: str, rollout: _Rollout, candidate: Model | None) -> None:
        """Count the executions of the versions as they are now: each can have been loaded again."""
        try:
            stable = self._catalog.resolve(name, str(rollout.state.stable))
        except ServingError:
            stable = None
        compared = candidate is not None and (stable is not None or rollout.state.share == 100)
        rollout.comparable = self._catalog.generation if compared else -1
        if rollout.models == (stable, candidate):
            return
        self._unobserve(rollout)
        rollout.models = stable, candidate
        rollout.trial.forget_metrics()

        def is_comparable() -> bool:  # after a change of the catalog, unknown until the next look
            return self._catalog.generation == rollout.comparable

        if stable is not None:
            stable.statistics.observer = SideObserver(rollout.trial, "stable", is_comparable)
        if candidate is not None:
            candidate.statistics.observer = SideObserver(rollout.trial, "candidate", is_comparable)
            rollout.deaths = candidate.statistics.workers_lost
            rollout.timeouts = candidate.statistics.execution_timeouts

    def _read_metrics(self, rollout: _Rollout) -> None:
        """Count what the versions have added to the counters that guards look at."""
        if rollout.comparable < 0:
            return
        sides: tuple[Side, Side] = ("stable", "candidate")
        for side, model in zip(sides, rollout.models, strict=True):
            if model is not None:
                for name in rollout.trial.metrics:
                    rollout.trial.metric(name, side, counter_value(model, name))

    def _unobserve(self, rollout: _Rollout) -> None:
        for model in rollout.models:
            if model is not None:
                model.statistics.observer = None
        rollout.models = None, None

    # ---- what follows --------------------------------------------------------------------------------

    def _enter(self, name: str, by: str) -> None:
        """Set the share of a new state, and say so. New requests follow it at once."""
        rollout = self._rollouts[name]
        state = rollout.state
        if state.phase == "step" or not state.active:
            rollout.trial.begin_step(state.share if state.active else 0)
        if not state.active:
            self._unobserve(rollout)
        share = state.share
        text = "rollout of version %d of model '%s': %s; version %d gets %d %%, version %d %d %%"
        reason = reason_text("" if described(state).startswith(state.reason) else state.reason, state.by)
        what = ". ".join(filter(None, (described(state), reason)))
        # If the server stops a rollout, a person must look at it; if a person has stopped it, not.
        level = logging.ERROR if state.phase == "aborted" and not state.by else logging.INFO
        logger.log(level, text, state.candidate, name, what, state.candidate, share, state.stable, 100 - share)
        self._rules.use_for_rollout(name, rule_for(state, self._rules.rule_of(name)), by)
        if state.active:
            self._observe(name, rollout, self._candidate(name, state))
        self._set_alarm()

    def _stable_of(self, name: str, rule: TrafficSettings, candidate: int) -> int:
        """Return the version that has the largest share now. Raises `ServingError`."""
        weights = [(weight, *rule.target(text)) for text, weight in rule.weights.items()]
        own = [(weight, int(version)) for weight, model, version in weights if version and model in ("", name)]
        if own:
            return max(own, key=lambda each: each[0])[1]
        newest = self._catalog.resolve(name).version
        if newest != candidate:
            return newest
        below = [model.version for model in self._catalog.ready_models(name) if model.version < candidate]
        if not below:
            raise InvalidArgument(
                f"model '{name}' has no version below {candidate} that is READY: name the stable version"
            )
        return below[-1]


def _verdict(rollout: _Rollout) -> GuardVerdict | None:
    """Return what the guards say; None before the first event. Without the stable version they can say nothing."""
    state = rollout.state
    if state.phase in ("step", "paused") and state.share < 100 and rollout.models[0] is None:
        return GuardVerdict("inconclusive", f"version {state.stable} is not READY: there is nothing to compare with")
    return rollout.trial.verdict()


def counter_value(model: Model, name: str) -> float:
    """Return the sum of a counter that a model defines, over all labels; 0 before it is defined."""
    family = model.statistics.custom.families.get((name, MetricKind.COUNTER))
    return 0.0 if family is None else sum(series.value for series in family.series.values())


def _give_up(request: Request) -> None:
    """Fail a request that its version may never execute: one that is queued by way of its scheduler."""
    error = Unavailable(
        "the version that was to execute the request cannot, and its rollout was stopped: send it again"
    )
    if request.dispatched and not request.finished:
        request.fail(error)
    else:
        request.expire(error)


def rule_for(state: RolloutState, rule: TrafficSettings) -> TrafficSettings:
    """Return the traffic rule of a model for the state of its rollout. Labels that are not its own stay. Pure."""
    stable, candidate = state.stable, state.candidate
    if state.phase == "done":
        # Clients that name `canary`, and rules that lead to it, must not fail because it has become the stable version.
        labels: dict[str, Any] = {"stable": candidate, "canary": candidate, "previous": stable}
        weights = {"stable": 1}
    else:
        labels, weights = {"stable": stable, "canary": candidate}, {"stable": 100 - state.share, "canary": state.share}
        if state.phase == "aborted":
            weights = {"stable": 1}
    others = {label: found for label, found in rule.labels.items() if label not in ("stable", "canary", "previous")}
    names = {*others, *labels}
    shadow = None if rule.shadow is None or rule.shadow.to not in {*names, str(stable), str(candidate)} else rule.shadow
    if "outputs" in state.settings.guards:
        shadow = ShadowSettings("canary", state.settings.shadow_percent) if state.phase in ("step", "paused") else None
    if state.active and any(each.startswith("metric:") for each in state.settings.guards):
        shadow = None  # its copies would raise the candidate's counter, too
    rules = tuple(each for each in rule.rules if each.to.isdigit() or each.to in names)
    key = rule.key if state.settings.key is None else state.settings.key
    return msgspec.structs.replace(
        rule, labels={**others, **labels}, weights=weights, rules=rules, key=key, shadow=shadow
    )

"""The traffic rules of all models: from files and from clients, and what is known of them.

A rule that a client has set is used in place of that of the file until it is reset, or until the server ends. The file
is read when the models of a repository are listed: at the start, at each poll, and when the model is loaded.
"""

from __future__ import annotations

import functools
import logging
import random
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.errors import InvalidArgument, ModelNotFound, ServingError
from kernel.serving.interface import KeptPair, RewardFigures, RolloutFigures, RoutedCount, ShadowFigures, TargetShare
from kernel.traffic.feedback import Feedback, read_rewards
from kernel.traffic.rollout_states import read_defaults
from kernel.traffic.rollouts import Rollouts
from kernel.traffic.route import BUCKETS, REASONS, TrafficRoute
from kernel.traffic.settings import TrafficSettings, changed, read_settings, read_toml
from kernel.traffic.shadow import Shadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.loop.clock import Alarm, Clock
    from kernel.serving.route import RouteRules
    from kernel.traffic.rollouts import ModelLoads
    from kernel.traffic.route import FeedbackMemory, Routed
    from kernel.traffic.settings import FeedbackSettings
    from kernel.traffic.shadow import ShadowParts
    from shm.blocks import ByteBudget

logger = logging.getLogger(__name__)

#: How many changes of the rules of a model are remembered, and the most bytes of them in JSON. One always is.
MOST_CHANGES = 100

MOST_CHANGES_BYTE_SIZE = 256 << 10

#: How often it is looked whether a rollout has to begin by itself.
WATCH_NS = 500_000_000

#: How long the loop does other things between two slices of what is forgotten.
_FORGET_NS = 5_000_000

#: The most models that can have a rule of a client: names of models that are not there yet could be many.
_MOST_MODELS = 1000


class RuleChange(msgspec.Struct, frozen=True):
    """A change of the rule of a model, or of its rollout."""

    #: UTC, as in ISO 8601.
    time: str
    #: `file`, or the protocol and address of the client.
    by: str
    #: The rule from then on; None for none.
    rule: dict[str, Any] | None
    #: Why, of a change by a rollout.
    reason: str = ""


class _History:
    """The last changes of one model, the oldest first."""

    def __init__(self) -> None:
        self._changes: deque[tuple[RuleChange, int]] = deque()
        self._byte_size = 0

    def __iter__(self) -> Iterator[RuleChange]:
        return (change for change, _ in self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, change: RuleChange) -> None:
        """Remember a change, and forget the oldest ones beyond the limits."""
        byte_size = len(msgspec.json.encode(change))
        self._changes.append((change, byte_size))
        self._byte_size += byte_size
        while len(self._changes) > MOST_CHANGES or (
            len(self._changes) > 1 and self._byte_size > MOST_CHANGES_BYTE_SIZE
        ):
            self._byte_size -= self._changes.popleft()[1]

    def as_list(self) -> list[dict[str, Any]]:
        """Return it for JSON."""
        return [msgspec.to_builtins(change) for change in self]


class TrafficKeeper(Protocol):
    """Keeps the rules over a restart. Implemented by `kernel.traffic.state_file.StateFile`."""

    def save(self, document: dict[str, Any]) -> None:
        """Keep what `Traffic.document` has returned. Never waits."""


class _ModelTraffic:
    """What is known of one model."""

    def __init__(self) -> None:
        self.file: TrafficSettings | None = None
        #: Why the file has no effect; "" if it has one or is not there.
        self.file_error = ""
        self.of_client: TrafficSettings | None = None
        self.route: TrafficRoute | None = None
        #: The last shadow, also if it gets nothing any more: people look at what it has found.
        self.shadow: Shadow | None = None
        #: What the target of the shadow named when it began.
        self.shadow_means = ("", "")
        #: The last one, also if nobody reports rewards any more.
        self.feedback: Feedback | None = None
        #: By model and version.
        self.routed: dict[tuple[str, int], Routed] = {}
        self.history = _History()
        #: What a restart must not forget, which is made again after each change; None if there was one.
        self.kept: dict[str, Any] | None = None
        #: The version whose rollout could not begin by itself under this rule; 0 for none.
        self.refused_version = 0

    @property
    def automatic(self) -> bool:
        """Whether rollouts of the model begin by themselves."""
        return self.route is not None and self.route.settings.rollout.get("automatic", False) is True


class Traffic:
    """Sets the rules of models. Implements `TrafficControl` of front doors and `FileRules` of the repository."""

    def __init__(
        self,
        rules: RouteRules,
        clock: Clock,
        budget: ByteBudget,
        loads: ModelLoads | None = None,
        *,
        namespacing: bool = False,
        draw: Callable[[], float] = random.random,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Ids of requests count in `budget`. `loads` loads candidates of rollouts. `draw` returns a number from 0 to 1
        for a request without a key, `utc` the time for the history.
        """
        self._rules = rules
        self._catalog = rules.catalog
        self._clock = clock
        self._budget = budget
        self._namespacing = namespacing
        self._draw = draw
        self._utc = utc
        self._models: dict[str, _ModelTraffic] = {}
        self.rollouts = Rollouts(self, rules.catalog, clock, loads)
        #: None: a restart forgets what clients have set.
        self.keeper: TrafficKeeper | None = None
        #: Set by the composition root; None where no shadow can be.
        self.shadow_parts: ShadowParts | None = None
        #: Rings while a rule lets rollouts begin by themselves; made when it is first needed.
        self._watch: Alarm | None = None
        #: What no rule needs any more: its requests are forgotten in slices.
        self._ended: deque[Feedback] = deque()
        self._forgetting: Alarm | None = None

    # ---- kernel.repository.repositories.FileRules ------------------------------------------------

    def set_file(self, name: str, text: bytes | None, error: ServingError | None = None) -> None:
        """Use the content of the model's file; None if there is none. `error` is why it could not be read.

        A file that is wrong changes nothing: the log and `report` say what is wrong.
        """
        traffic = self._models.get(name)
        if text is None and error is None and traffic is None:
            return
        traffic = self._models.setdefault(name, _ModelTraffic())
        try:
            if error is not None:
                raise error
            if text is not None and self._namespacing:
                raise InvalidArgument("traffic rules are not possible with --model-namespacing=true")
            settings = None if text is None else _checked(read_toml(text))
        except ServingError as wrong:
            if traffic.file_error != wrong.message:
                logger.error("model '%s': traffic.toml has no effect: %s", name, wrong.message)
            traffic.file_error = wrong.message
            return
        traffic.file_error = ""
        if settings == traffic.file:
            return
        traffic.refused_version = 0
        traffic.file = settings
        if traffic.of_client is not None:
            logger.warning(
                "model '%s': the new traffic.toml is not used, because a client has set another rule; "
                "POST /v2/models/%s/traffic/reset ends that",
                name, name,
            )  # fmt: skip
            return
        self._use(name, traffic, settings, "file")

    # ---- kernel.serving.interface.TrafficControl -----------------------------------------

    def report(self, name: str) -> dict[str, Any]:
        traffic = self._of(name)
        route = traffic.route
        source = "client" if traffic.of_client is not None else "file" if route is not None else "none"
        return {
            "model": name,
            "source": source,
            "rollout": self.rollouts.status(name),
            **({"file_error": traffic.file_error} if traffic.file_error else {}),
            "rule": {} if route is None else route.settings.as_dict(),
            "targets": [] if route is None else [msgspec.to_builtins(state) for state in route.states()],
            "shadow": _shadow_report(traffic),
            "feedback": self._feedback_report(traffic),
            "requests": [msgspec.to_builtins(count) for count in _counts(traffic)],
            "history": traffic.history.as_list()[::-1],
        }

    def change(self, name: str, members: dict[str, Any], by: str) -> None:
        traffic = self._of(name)
        if self._namespacing:
            raise InvalidArgument("traffic rules are not possible with --model-namespacing=true")
        if self.rollouts.is_active(name):
            raise InvalidArgument(f"a rollout of model '{name}' decides about its traffic: abort or promote it first")
        if name not in self._models and len(self._models) >= _MOST_MODELS:
            raise InvalidArgument(f"{_MOST_MODELS} models have traffic rules already")
        settings = _checked(changed(traffic.of_client or traffic.file or TrafficSettings(), members))
        self._models[name] = traffic
        traffic.refused_version = 0
        traffic.of_client = settings
        self._use(name, traffic, settings, by)

    def reset(self, name: str, by: str) -> None:
        traffic = self._of(name)
        if self.rollouts.is_active(name):
            raise InvalidArgument(f"a rollout of model '{name}' decides about its traffic: abort or promote it first")
        if traffic.of_client is None:
            return
        traffic.refused_version = 0
        traffic.of_client = None
        self._use(name, traffic, traffic.file, by)

    def start_rollout(self, name: str, document: dict[str, Any], by: str) -> None:
        if self._namespacing:
            raise InvalidArgument("rollouts are not possible with --model-namespacing=true")
        self._of(name)
        self.rollouts.start(name, document, by)

    def command_rollout(self, name: str, action: str, by: str) -> None:
        self._of(name)
        self.rollouts.command(name, action, by)

    def rollout_figures(self) -> list[RolloutFigures]:
        figures = self.rollouts.figures()
        return [
            RolloutFigures(name, state.candidate, state.stable, state.phase, state.share, figures[name])
            for name, state in self.rollouts.states().items()
        ]

    def _feedback_report(self, traffic: _ModelTraffic) -> dict[str, Any] | None:
        if traffic.feedback is None:
            return None
        traffic.feedback.forget_old(self._clock.now_ns())
        return traffic.feedback.as_dict()

    def reward(self, name: str, document: Any) -> dict[str, int]:
        traffic = self._of(name)
        if traffic.route is None or traffic.route.settings.feedback is None or traffic.feedback is None:
            raise InvalidArgument(f"the traffic rule of model '{name}' has no 'feedback': no rewards are counted")
        rewards = read_rewards(document)
        counted = traffic.feedback.reward(rewards, self._clock.now_ns())
        return {"counted": counted, "unknown": len(rewards) - counted}

    def rewards(self) -> list[RewardFigures]:
        return [
            RewardFigures(model, version, each.count, each.mean * each.count)
            for traffic in self._models.values()
            if traffic.feedback is not None
            for (model, version), each in traffic.feedback.by_version().items()
        ]

    def shadow_figures(self) -> list[ShadowFigures]:
        return [
            ShadowFigures(
                name,
                shadow.settings.to,
                shadow.report.pairs,
                shadow.report.differing,
                dict(shadow.report.dropped),
                {output: dict(each.differing) for output, each in shadow.report.outputs.items()},
                {output: each.quantiles() for output, each in shadow.report.outputs.items()},
            )
            for name, traffic in self._models.items()
            if (shadow := traffic.shadow) is not None
        ]

    def shadow_of(self, name: str) -> Shadow | None:
        """Return the last shadow of a model. Raises `ModelNotFound`."""
        return self._of(name).shadow

    def worst_pairs(self, name: str) -> list[KeptPair]:
        shadow = self._of(name).shadow
        return [] if shadow is None else [kept for _, _, kept in shadow.report.worst]

    def routed(self) -> list[RoutedCount]:
        return [count for traffic in self._models.values() for count in _counts(traffic)]

    def shares(self) -> dict[str, list[TargetShare]]:
        return {
            name: [
                TargetShare(state.model, state.version, state.share / BUCKETS)
                for state in traffic.route.states()
                if state.text in traffic.route.settings.weights and state.version
            ]
            for name, traffic in self._models.items()
            if traffic.route is not None
        }

    # ---- kernel.traffic.rollouts.RuleSetter ----------------------------------------------------

    def rule_of(self, name: str) -> TrafficSettings:
        """Return the rule that a model has. Raises `ModelNotFound`."""
        traffic = self._of(name)
        return traffic.of_client or traffic.file or TrafficSettings()

    def use_for_rollout(self, name: str, settings: TrafficSettings, by: str) -> None:
        """Use the rule of a rollout, and keep the state of the rollout with it."""
        traffic = self._models.setdefault(name, _ModelTraffic())
        traffic.of_client = settings
        state = self.rollouts.states()[name]
        self._use(name, traffic, settings, by, state.reason)

    # ---- a restart -----------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """Return what a restart must not forget. Only what is new is made: a thousand models can have rules."""
        found = {}
        for name, traffic in self._models.items():
            if not len(traffic.history):
                continue
            if traffic.kept is None:
                traffic.kept = {
                    "rule": None if traffic.of_client is None else traffic.of_client.as_dict(),
                    "rollout": self.rollouts.document(name),
                    "history": traffic.history.as_list(),
                }
            found[name] = traffic.kept
        return found

    def restore(self, document: dict[str, Any]) -> None:
        """Use what another server has kept, before any model is loaded. Raises `InvalidArgument`."""
        try:
            for name, kept in document.items():
                traffic = self._models.setdefault(name, _ModelTraffic())
                for change in msgspec.convert(kept["history"], list[RuleChange]):
                    traffic.history.add(change)
                if kept["rule"] is not None:
                    traffic.of_client = read_settings(kept["rule"])
                    self._use(name, traffic, traffic.of_client, "the start of the server")
                if kept["rollout"] is not None:
                    self.rollouts.restore(name, kept["rollout"])
        except (msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(
                f"traffic.json in the state directory is not what the server has written: {error}. Restore it, or "
                "remove it to begin without the rules and rollouts of clients"
            ) from None

    # ---- the rest ------------------------------------------------------------------------------------

    def _of(self, name: str) -> _ModelTraffic:
        """Return what is known of a model. Raises `ModelNotFound` if neither catalog nor rules know it."""
        traffic = self._models.get(name)
        if traffic is None:
            if name not in self._catalog.identifiers():
                raise ModelNotFound(name)
            return _ModelTraffic()
        return traffic

    def kept_versions(self, name: str) -> set[int]:
        """Return the versions that the rule of a model names: the version policy does not unload them."""
        traffic = self._models.get(name)
        if traffic is None or traffic.route is None:
            return set()
        settings = traffic.route.settings
        targets = [settings.target(text) for text in [*settings.labels, *settings.weights]]
        return {int(version) for model, version in targets if version and model in ("", name)}

    def may_fail(self, name: str, version: int) -> bool:
        """Whether the clients do not need a version: it is on trial or was stopped, or another one is in its place."""
        state = self.rollouts.states().get(name)
        if state is not None and version == (state.stable if state.phase == "done" else state.candidate):
            return True
        traffic = self._models.get(name)
        return traffic is not None and traffic.automatic and version > max(self.kept_versions(name), default=version)

    def _use(
        self, name: str, traffic: _ModelTraffic, settings: TrafficSettings | None, by: str, reason: str = ""
    ) -> None:
        """Let `settings` decide from now on; None: the newest version gets all requests."""
        rule = None if settings is None else settings.as_dict()
        former = None if traffic.route is None else traffic.route.settings.as_dict()
        traffic.history.add(RuleChange(self._utc().isoformat(timespec="seconds"), by, rule, reason))
        traffic.kept = None
        feedback = self._set_feedback(traffic, None if settings is None else settings.feedback)
        if settings is None:
            traffic.route = None
            self._set_shadow(name, traffic, None)
            self._catalog.set_labels(name, {})
        else:
            shadow = self._set_shadow(name, traffic, settings)
            traffic.route = TrafficRoute(name, settings, self._catalog, self._draw, traffic.routed, shadow, feedback)
            targets = {label: settings.target(label) for label in settings.labels}
            self._catalog.set_labels(name, {label: (model or name, text) for label, (model, text) in targets.items()})
        self._rules.set(name, traffic.route)
        self._set_watch()
        if self.keeper is not None:
            self.keeper.save(self.document())
        logger.info("model '%s': traffic rule %s in place of %s, set by %s", name, rule, former, by)
        if name not in self._catalog.identifiers():  # at the start of the server: its versions come later
            return
        for state in () if traffic.route is None else traffic.route.states():
            if state.trouble:
                logger.warning("model '%s': target '%s' gets no requests: %s", name, state.text, state.trouble)
        if traffic.route is not None and traffic.route.shadow_trouble:
            logger.warning("model '%s': the shadow gets no requests: %s", name, traffic.route.shadow_trouble)

    def _set_feedback(self, traffic: _ModelTraffic, settings: FeedbackSettings | None) -> FeedbackMemory | None:
        """Return what remembers requests by a rule. Rewards are counted on, whatever the weights are."""
        feedback = traffic.feedback
        if feedback is not None and feedback.settings != settings and feedback not in self._ended:
            self._ended.append(feedback)  # its table stays until there is another one
            self._forget_ended()
        if settings is None:
            return None
        if feedback is None or feedback.settings != settings:
            feedback = traffic.feedback = Feedback(settings, self._budget)
        elif feedback in self._ended:
            self._ended.remove(feedback)
        now_ns, remember = self._clock.now_ns, feedback.remember
        return lambda id, version: remember(id, version, now_ns())

    def _forget_ended(self) -> None:
        """Give a slice of the memory of what has ended back, and go on soon."""
        if self._ended and not self._ended[0].forget_some():
            self._ended.popleft()
        if self._ended:
            if self._forgetting is None:
                self._forgetting = self._clock.alarm(self._forget_ended)
            self._forgetting.set(self._clock.now_ns() + _FORGET_NS)

    def _set_watch(self) -> None:
        if any(each.automatic for each in self._models.values()):
            if self._watch is None:
                self._watch = self._clock.alarm(self._begin_rollouts)
            self._watch.set(self._clock.now_ns() + WATCH_NS)

    def _begin_rollouts(self) -> None:
        """Begin the rollouts that begin by themselves."""
        for name, traffic in list(self._models.items()):
            if not traffic.automatic or (version := self.rollouts.due(name, self.rule_of(name))) is None:
                continue
            if traffic.refused_version == version:  # it was logged why
                continue
            try:
                self.rollouts.start(name, {"to": version}, "traffic.toml")
            except ServingError as error:
                traffic.refused_version = version
                logger.error("the rollout of version %d of model '%s' cannot begin: %s", version, name, error)
        self._set_watch()

    def _set_shadow(self, name: str, traffic: _ModelTraffic, settings: TrafficSettings | None) -> Shadow | None:
        """Return the shadow for a rule: the one that is there, if nothing of it changes. Another one counts anew."""
        found, wanted = traffic.shadow, None if settings is None else settings.shadow
        means = ("", "") if settings is None or wanted is None else settings.target(wanted.to)
        if found is not None and not found.closed:
            same = settings is not None and (found.settings, found.outputs) == (wanted, settings.outputs)
            if same and means == traffic.shadow_means:
                return found
            found.close()
        if wanted is None or settings is None or self.shadow_parts is None:
            return None
        if found is not None:
            found.forget()
        shadow = Shadow(wanted, settings.outputs, self._clock, self.shadow_parts, self._draw)
        shadow.observer = functools.partial(self.rollouts.compared, name)
        traffic.shadow, traffic.shadow_means = shadow, means
        return shadow


def _checked(settings: TrafficSettings) -> TrafficSettings:
    """Return the settings. Raises `InvalidArgument` if what they say of rollouts is wrong."""
    read_defaults(settings.rollout)
    if settings.rollout.get("automatic") and not settings.weights:
        raise InvalidArgument(
            "'automatic' in 'rollout' needs 'weights' with the stable version: without them the newest version "
            "would get all requests before its rollout"
        )
    return settings


def _shadow_report(traffic: _ModelTraffic) -> dict[str, Any] | None:
    """Return what is known of the shadow of a model; None if it has had none."""
    shadow, route = traffic.shadow, traffic.route
    if shadow is None:
        return None
    trouble = "" if route is None or shadow.closed else route.shadow_trouble
    settings = msgspec.to_builtins(shadow.settings)
    return {**settings, "active": not shadow.closed, "trouble": trouble, **shadow.report.as_dict()}


def _counts(traffic: _ModelTraffic) -> list[RoutedCount]:
    return [
        RoutedCount(model, version, reason, count)
        for (model, version), routed in sorted(traffic.routed.items())
        for reason in REASONS
        if (count := getattr(routed, reason))
    ]

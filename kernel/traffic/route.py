"""Decides which version executes a request for a model that has a traffic rule. A `RouteRule` of the kernel.

No clock, no I/O: it reads the request and the catalog.

There are 10,000 buckets of requests. A key has the bucket `crc32(key, crc32(model + NUL + salt + NUL)) mod 10000`, both
texts in UTF-8: the same in each server and after each restart. Other targets than the first own the lowest buckets, in
their order, and the first one the rest. So a target whose weight grows takes keys from the first target, and gives it
none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from zlib import crc32

import msgspec

from kernel.errors import ServingError
from kernel.serving.model import Model  # noqa: TC001 - msgspec reads it
from kernel.serving.route import WithSecond
from kernel.serving.sequence_model import SequenceModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.spec import ModelSpec
    from kernel.serving.catalog import Catalog
    from kernel.serving.request import Request, WantedInference
    from kernel.traffic.settings import MatchRule, OutputRule, TrafficSettings
    from kernel.traffic.shadow import Shadow

#: The resolution of shares.
BUCKETS = 10_000


def seed_of(model: str, salt: str) -> int:
    """Return where the hash of a key begins."""
    return crc32(f"{model}\0{salt}\0".encode())


def bucket_of(key: str, seed: int) -> int:
    """Return the bucket of a key."""
    return crc32(key.encode("utf-8", "surrogatepass"), seed) % BUCKETS


def bounds(weights: list[int]) -> list[int]:
    """Return for each target the bucket behind its last one; the first target has the highest buckets.

    A target with a weight owns a bucket at least, as long as there is one for it. The sum must be greater than 0.
    """
    total, begin = sum(weights), 0
    found = [BUCKETS]
    counted = 0
    for weight in weights[1:]:
        counted += weight
        end = max(begin, counted * BUCKETS // total)
        if weight and end == begin and end < BUCKETS:
            end += 1
        found.append(end)
        begin = end
    return found


#: Why a request goes to a version: its share, the hash of its key, a rule, the version or label that the client named,
#: the sequence that the version has, or the parent of the request.
REASONS = ("weight", "key", "rule", "version", "sequence", "parent")


class Routed(msgspec.Struct):
    """How many requests a version got, by reason."""

    weight: int = 0
    key: int = 0
    rule: int = 0
    version: int = 0
    sequence: int = 0
    parent: int = 0


class ResolvedTarget(msgspec.Struct, frozen=True, eq=False):
    """A version that takes requests, with its counters."""

    model: Model
    routed: Routed


class TargetState(msgspec.Struct, frozen=True):
    """What a label or number of the rule means now."""

    text: str
    model: str
    #: "" if that is the newest one and none is READY.
    version: str
    weight: int
    #: Of 10,000: what it gets now.
    share: int
    #: Why it gets nothing; "" if it can.
    trouble: str


class FeedbackMemory(Protocol):
    """Remembers which version has got a request."""

    def __call__(self, id: str, version: tuple[str, int]) -> None: ...


class _Matcher(Protocol):
    """Whether a request matches a rule."""

    def __call__(self, request: WantedInference) -> bool: ...


class TrafficRoute:
    """Chooses versions by the settings of one model. The catalog says which versions are READY."""

    def __init__(
        self, name: str, settings: TrafficSettings, catalog: Catalog, draw: Callable[[], float],
        routed: dict[tuple[str, int], Routed], shadow: Shadow | None = None, feedback: FeedbackMemory | None = None,
    ) -> None:  # fmt: skip
        """`draw` returns a number from 0 to 1. `routed` has the counters by model and version, and keeps them.

        `shadow` gets copies of requests, `feedback` the versions that have got them.
        """
        self.settings = settings
        self._name = name
        self._catalog = catalog
        self._draw = draw
        self._routed = routed
        self._shadow = shadow
        self._feedback = feedback
        #: Why the shadow gets nothing; empty if it can.
        self.shadow_trouble = ""
        self._seed = seed_of(name, settings.salt)
        self._key_of = _key_reader(settings.key)
        self._generation = -1
        #: Bound of the buckets → target, ascending; the last one has the highest buckets.
        self._shares: list[tuple[int, ResolvedTarget]] = []
        self._matchers: list[tuple[_Matcher, ResolvedTarget]] = []
        #: The versions that clients have named → target.
        self._named: dict[str, ResolvedTarget] = {}
        #: READY versions of the model that have sequences, newest first.
        self._with_sequences: list[ResolvedTarget] = []

    # ---- kernel.serving.route.RouteRule ------------------------------------------------

    def choose(self, request: Request) -> Model | WithSecond:
        """Return the version for `request`, and the shadow if it gets a copy. Raises `ServingError`: none is READY."""
        model = self._version_for(request)
        if self._feedback is not None and request.id:
            self._feedback(request.id, model.identity)
        shadow = self._shadow
        return model if shadow is None or not shadow.wants(request, model) else WithSecond(model, shadow)

    def _version_for(self, request: Request) -> Model:
        if self._generation != self._catalog.generation:
            self._resolve()
        if self._with_sequences and request.correlation_id and (owner := self._owner_of(request)) is not None:
            return owner
        if request.model_version:
            return self._of_client(request.model_version)
        for matches, target in self._matchers:
            if matches(request):
                target.routed.rule += 1
                return target.model
        if self._key_of is not None and (key := self._key_of(request)):
            bucket = request.bucket = bucket_of(key, self._seed)
            for bound, target in self._shares:
                if bucket < bound:
                    target.routed.key += 1
                    return target.model
            return self._catalog.resolve(self._name)
        bucket = request.bucket = int(self._draw() * BUCKETS)
        for bound, target in self._shares:
            if bucket < bound:
                target.routed.weight += 1
                return target.model
        return self._catalog.resolve(self._name)

    def choose_for(self, request: Request, parent: Request) -> Model:
        """Return the version for a request that is made for `parent`: all of one client's request see one side.

        `request` has the sequence; the rules look at the request of the client. Raises `ServingError`.
        """
        model = self._version_for_parent(request, parent)
        if self._shadow is not None:
            self._shadow.is_used(model)
        return model

    def _version_for_parent(self, request: Request, parent: Request) -> Model:
        if self._generation != self._catalog.generation:
            self._resolve()
        if self._with_sequences and request.correlation_id and (owner := self._owner_of(request)) is not None:
            return owner
        while parent.parent is not None:
            parent = parent.parent
        for matches, target in self._matchers:
            if matches(parent):
                target.routed.parent += 1
                return target.model
        bucket = parent.bucket
        if bucket < 0:
            bucket = parent.bucket = self._bucket_for(parent)
        for bound, target in self._shares:
            if bucket < bound:
                target.routed.parent += 1
                return target.model
        return self._catalog.resolve(self._name)

    def _bucket_for(self, request: Request) -> int:
        """Return the bucket of a client's request to another model."""
        key = self._key_of(request) if self._key_of is not None else ""
        return bucket_of(key, self._seed) if key else int(self._draw() * BUCKETS)

    def _owner_of(self, request: Request) -> Model | None:
        """Return the READY version that has the sequence of the request; None if none has, or the request may not.

        It counts the request.
        """
        for target in self._with_sequences:
            model = target.model
            if isinstance(model, SequenceModel) and model.sequences.has(request.correlation_id):
                version = request.model_version
                # A client that names a number means it; a label may have moved since the sequence began.
                if not version or version == model.version_text or self._catalog.has_label(self._name, version):
                    target.routed.sequence += 1
                    return model
        return None

    def _of_client(self, version: str) -> Model:
        target = self._named.get(version)
        if target is None:
            model = self._catalog.resolve(self._name, version)
            if len(self._named) >= 64:  # "4", "04" and "4 and more" are the same version for Triton
                self._named.clear()
            target = self._named[version] = self._target(model)
        target.routed.version += 1
        return target.model

    # ---- what the settings mean while the catalog has one generation ---------------------------------

    def _resolve(self) -> None:
        """Look up which targets are READY."""
        self._generation = self._catalog.generation
        self._named = {}
        living = {model.identity for model in self._catalog.executing_models()}
        for gone in self._routed.keys() - living:
            del self._routed[gone]
        texts = list(self.settings.weights)
        found = [self._find(text) for text in texts]
        weights = [
            weight if isinstance(target, ResolvedTarget) else 0
            for weight, target in zip(self.settings.weights.values(), found, strict=True)
        ]
        self._shares = []
        if any(weights):
            shares = [
                (bound, target)
                for bound, target, weight in zip(bounds(weights), found, weights, strict=True)
                if weight and isinstance(target, ResolvedTarget)
            ]
            self._shares = sorted(shares, key=lambda share: share[0])
            self._shares[-1] = (BUCKETS, self._shares[-1][1])  # if the first target has no weight
        self._matchers = [
            (_matcher(rule), target)
            for rule in self.settings.rules
            if isinstance(target := self._find(rule.to), ResolvedTarget)
        ]
        ready = (model for model in reversed(self._catalog.ready_models(self._name)))
        self._with_sequences = [self._target(model) for model in ready if isinstance(model, SequenceModel)]
        if self._shadow is not None:
            self._aim(self._shadow)

    def _aim(self, shadow: Shadow) -> None:
        """Let the shadow's target get copies, or say why it cannot."""
        found = self._find(shadow.settings.to)
        self.shadow_trouble = found if isinstance(found, str) else why_not_compared(found.model.spec, shadow.outputs)
        if self.shadow_trouble or isinstance(found, str):
            shadow.aim(None)
            return
        model = found.model
        others = [target.model for _, target in self._shares] + [target.model for _, target in self._matchers]
        # Requests that name another model do not come by this rule.
        shadow.aim(model, only_copies=model.name == self._name and model not in others)

    def _find(self, text: str) -> ResolvedTarget | str:
        """Return what a label or number means, or why that takes no requests."""
        name, version = self.settings.target(text)
        try:
            model = self._catalog.resolve(name or self._name, version)
        except ServingError as error:
            return error.message
        if name and name != self._name:
            try:
                own = self._catalog.resolve(self._name)
            except ServingError as error:
                return error.message
            if (difference := signature_difference(own.spec, model.spec)) is not None:
                return f"model '{name}' has {difference} than model '{self._name}'"
        return self._target(model)

    def _target(self, model: Model) -> ResolvedTarget:
        return ResolvedTarget(model, self._routed.setdefault(model.identity, Routed()))

    def states(self) -> list[TargetState]:
        """Return what the labels and weights mean now."""
        self._resolve()
        shares: dict[int, int] = {}
        begin = 0
        for bound, target in self._shares:
            shares[id(target.model)] = shares.get(id(target.model), 0) + bound - begin
            begin = bound
        states = []
        for text in dict.fromkeys([*self.settings.labels, *self.settings.weights]):
            weight, found = self.settings.weights.get(text, 0), self._find(text)
            if isinstance(found, ResolvedTarget):
                model = found.model
                share = shares.get(id(model), 0) if weight else 0
                states.append(TargetState(text, model.name, model.version_text, weight, share, ""))
            else:
                name, version = self.settings.target(text)
                states.append(TargetState(text, name or self._name, version, weight, 0, found))
        return states


def signature_difference(own: ModelSpec, other: ModelSpec) -> str | None:
    """Return what makes requests for one model unfit for the other one; None if nothing does."""
    for what, mine, its in (
        ("other inputs", own.inputs, other.inputs),
        ("other outputs", own.outputs, other.outputs),
        ("another max_batch_size", own.max_batch_size, other.max_batch_size),
        ("another transaction policy", own.decoupled, other.decoupled),
        ("another kind of batching of sequences", own.sequence_batching is None, other.sequence_batching is None),
    ):
        if mine != its:
            return what
    return None


def why_not_compared(spec: ModelSpec, rules: dict[str, OutputRule]) -> str:
    """Return why the outputs of a model cannot be compared by `rules`; empty if they can."""
    if spec.decoupled:
        return f"model '{spec.name}' is decoupled: any number of responses cannot be compared in pairs"
    if spec.sequence_batching is not None:
        return f"model '{spec.name}' has sequences: a copy of a request would change the state of its sequence"
    for name, rule in rules.items():
        output = spec.outputs.get(name)
        if output is None:
            return f"model '{spec.name}' has no output '{name}', which 'outputs' has a rule for"
        if rule.compare in ("top1", "order") and output.datatype == "BYTES":
            return f"output '{name}' has the datatype BYTES, which has no best classes: '{rule.compare}' needs numbers"
    return ""


def _key_reader(key: str) -> Callable[[WantedInference], str] | None:
    """Return a function that returns the key of a request, "" if it has none; None if requests have no keys."""
    kind, _, name = key.partition(":")
    if kind == "header":
        header = name.lower()
        return lambda request: request.sink.header(header)
    if kind == "parameter":
        return lambda request: "" if (found := request.parameters.get(name)) is None else _text(found)
    if kind == "sequence":
        return lambda request: str(request.correlation_id or "")
    return (lambda request: request.id) if kind else None


def _matcher(rule: MatchRule) -> _Matcher:
    """Return a function that says whether a request matches `rule`."""
    values = frozenset(rule.values)
    if rule.header is not None:
        header = rule.header.lower()

        def has_header(request: WantedInference) -> bool:
            value = request.sink.header(header)
            return value in values if values else bool(value)

        return has_header
    if rule.parameter is not None:
        parameter = rule.parameter

        def has_parameter(request: WantedInference) -> bool:
            value = request.parameters.get(parameter)
            return value is not None and (not values or _text(value) in values)

        return has_parameter
    return lambda request: bool(request.correlation_id)


def _text(value: str | int | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The models and versions that the server knows, their states, and which version a request is for.

States and texts are Triton's (model_lifecycle.h, model_repository_manager.cc). Pure. The lifecycle changes the catalog;
front doors and the kernel read it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument, ModelNotFound, ModelNotReady, NoAvailableVersion, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from kernel.serving.model import Model

#: The reason of a version that was unloaded on request.
UNLOADED = "unloaded"

#: The number at the beginning of a version string, as C++'s `stol` reads it.
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")

#: The reason of a model that is in several repositories.
DUPLICATE_REASON = "model appears in two or more repositories"


class ModelState(enum.Enum):
    """State of one version."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class VersionEntry(msgspec.Struct):
    """A version that the server knows. `model` is set while it is READY or UNLOADING."""

    state: ModelState
    reason: str = ""
    model: Model | None = None


class IndexItem(msgspec.Struct, frozen=True):
    """One line of the repository index. A model that was never loaded has only a name."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Catalog:
    """Versions by model and number.

    The lifecycle uses a model's identifier, clients use its name. They are the same unless repositories are
    namespaces. Then several models can have one name, and requests with that name fail until only one such model is
    left.
    """

    def __init__(self, *, namespacing: bool = False) -> None:
        #: Grows with every change. A result of an earlier generation may no longer be valid.
        self.generation = 0
        #: Called at each change. Most servers have none.
        self.on_change: list[Callable[[], None]] = []
        self._namespacing = namespacing
        self._models: dict[str, dict[int, VersionEntry]] = {}
        #: By name: the highest READY version of the model with that name, if only one model has the name.
        self._newest: dict[str, Model] = {}
        #: Models of which no version can be loaded, with the reason.
        self._broken: dict[str, str] = {}
        #: Those of them that strict readiness wants.
        self._lacking: set[str] = set()
        #: Models that are in several repositories.
        self._duplicates: set[str] = set()
        #: Names, by identifier, of all models in the repositories, loaded or not.
        self._known: dict[str, str] = {}
        #: Versions that no new request reaches and that still have requests. The lifecycle adds and removes them.
        self.retiring: set[Model] = set()
        #: By name: the labels that clients may name in place of a version, each with a model and a version, "" for the
        #: newest one. Most models have none.
        self._labels: dict[str, Mapping[str, tuple[str, str]]] = {}

    # ---- changed by the lifecycle ------------------------------------------------------------

    def change(self) -> None:
        """Begin another generation: what was found out before may no longer be right."""
        self.generation += 1
        for callback in self.on_change:
            callback()

    def set_known(self, names: Mapping[str, str] | Iterable[str], duplicates: Iterable[str] = ()) -> None:
        """Set the models that the repositories have: names by identifier, or only names where both are the same.

        `duplicates` are models that are in several repositories.
        """
        known = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
        found_twice = set(duplicates)
        if known == self._known and found_twice == self._duplicates:
            return  # as at most polls, loads and questions for the index, which then disturb no request
        self.change()
        self._known, self._duplicates = known, found_twice
        for identifier in self._models:
            self._choose_newest(identifier)

    def set_broken(self, identifier: str, reason: str | None, *, is_model: bool = True) -> None:
        """Set the reason why no version of a model can be loaded; None removes it.

        `is_model` is False for a folder without a valid configuration. Strict readiness ignores such folders (Triton).
        """
        self.change()
        self._lacking.discard(identifier)
        if reason is None:
            self._broken.pop(identifier, None)
            return
        self._broken[identifier] = reason
        if is_model:
            self._lacking.add(identifier)

    def set_labels(self, name: str, labels: Mapping[str, tuple[str, str]]) -> None:
        """Set what the labels of a model mean: the name of a model, and a number of a version or "" for the newest."""
        self.change()
        if labels:
            self._labels[name] = dict(labels)
        else:
            self._labels.pop(name, None)

    def set_state(
        self, identifier: str, version: int, state: ModelState, reason: str = "", model: Model | None = None
    ) -> None:
        """Set the state of one version. `model` is given for READY and UNLOADING."""
        self.change()
        versions = self._models.setdefault(identifier, {})
        former = versions.get(version)
        if model is not None and former is not None and former.model is not None:
            model.follows(former.model)
        if model is not None:
            _share_spec(model, versions.values())
        versions[version] = VersionEntry(state, reason, model)
        self._choose_newest(identifier)

    def note_pending(self, identifier: str, version: int, reason: str) -> None:
        """Show in the index what the load of a version waits for."""
        entry = self._models.get(identifier, {}).get(version)
        if entry is not None and entry.state is ModelState.LOADING:
            entry.reason = reason

    def _choose_newest(self, identifier: str) -> None:
        name = self._name(identifier)
        claimants = self._claimants(name) if self._namespacing else [identifier]
        ready: list[Model] = []
        if len(claimants) == 1:
            ready = _ready(self._models[claimants[0]])
        if ready:
            former = self._newest.get(name)
            if former is not None and former is not ready[-1]:
                ready[-1].follows(former)
            self._newest[name] = ready[-1]
        else:
            self._newest.pop(name, None)

    def _name(self, identifier: str) -> str:
        return self._known.get(identifier, identifier)

    def _claimants(self, name: str) -> list[str]:
        """Return the identifiers of the models called `name` that have versions which were not unloaded on request."""
        return [
            identifier
            for identifier, versions in self._models.items()
            if self._name(identifier) == name and any(entry.reason != UNLOADED for entry in versions.values())
        ]

    # ---- read by front doors and the kernel ----------------------------------------------------

    def resolve(self, name: str, version: str = "", namespace: str = "") -> Model:
        """Return the model that executes requests for `name` and `version`; an empty version means the newest.

        If repositories are namespaces, a model of the repository `namespace` is preferred, as for steps of an ensemble.
        Raises `ModelNotFound`, `NoAvailableVersion`, `ModelNotReady` or `InvalidArgument`.
        """
        if not version and not namespace:
            newest = self._newest.get(name)
            if newest is not None:
                return newest
        if version and (labels := self._labels.get(name)) is not None and version in labels:
            return self.resolve(*labels[version])
        number = parse_version(version) if version else None
        identifier = self._identifier(name, namespace)
        versions = self._models.get(identifier, {})
        if number is None:
            ready = _ready(versions) if namespace else []
            if ready:
                return ready[-1]
            if versions or identifier in self._broken:
                raise NoAvailableVersion(name)
            raise ModelNotFound(name)
        entry = versions.get(number)
        if entry is None:
            raise ModelNotFound(name, str(number)) if versions else ModelNotFound(name)
        if entry.state is not ModelState.READY or entry.model is None:
            raise ModelNotReady(name, number)
        return entry.model

    def has_label(self, name: str, label: str) -> bool:
        """Whether `label` is one of a model's labels, which stand for versions."""
        return (labels := self._labels.get(name)) is not None and label in labels

    def number_of(self, name: str, version: str) -> int:
        """Return the number of the version that a text means: a number, or a label of the model.

        Raises `ServingError`, also for a label of another model.
        """
        if not self.has_label(name, version):
            return parse_version(version)
        model, number = self._labels[name][version]
        if model not in ("", name):
            raise InvalidArgument(f"label '{version}' of model '{name}' names model '{model}'")
        return parse_version(number) if number else self.resolve(name).version

    def finishing(self, name: str, version: str = "", namespace: str = "") -> Model | None:
        """Return the unloaded version, the newest one if `version` is empty, that still finishes its sequences."""
        if version and (labels := self._labels.get(name)) is not None and version in labels:
            name, version = labels[version]
        versions = self._models.get(self._identifier(name, namespace), {})
        numbers = [parse_version(version)] if version else sorted(versions, reverse=True)
        for number in numbers:
            entry = versions.get(number)
            if entry is not None and entry.model is not None and entry.model.finishes_sequences:
                return entry.model
        return None

    def _identifier(self, name: str, namespace: str = "") -> str:
        """Return the identifier of the model called `name`: of the only one, or of that in the repository `namespace`.

        Raises `InvalidArgument` if there is not one.
        """
        if not self._namespacing:
            return name
        claimants = self._claimants(name)
        if namespace and len(claimants) > 1:
            claimants = self._preferred(claimants, model_identifier(namespace, name))
        if not claimants:
            raise InvalidArgument(f"Request for unknown model: '{name}' is not found")
        if len(claimants) > 1:
            raise InvalidArgument(
                f"There are {len(claimants)} identifiers of model '{name}' in global map, model namespace must be "
                "provided to resolve ambiguity."
            )
        return claimants[0]

    def _preferred(self, claimants: list[str], own: str) -> list[str]:
        """Return the claimant `own`, or all others if it is being unloaded or is none of them."""
        if own not in claimants:
            return claimants
        states = {entry.state for entry in self._models[own].values()}
        if states & {ModelState.READY, ModelState.LOADING}:
            return [own]
        return [each for each in claimants if each != own]

    def entry(self, identifier: str, version: int) -> VersionEntry | None:
        return self._models.get(identifier, {}).get(version)

    def versions(self, identifier: str) -> dict[int, VersionEntry]:
        """Return all versions of a model that were ever given a state, in the order of their numbers."""
        return dict(sorted(self._models.get(identifier, {}).items()))

    def ready_models(self, name: str = "") -> list[Model]:
        """Return the READY versions of all models, or of those called `name`, in the order of identifier and number."""
        return [
            entry.model
            for identifier, versions in sorted(self._models.items())
            if not name or self._name(identifier) == name
            for _, entry in sorted(versions.items())
            if entry.state is ModelState.READY and entry.model is not None
        ]

    def ready_names(self) -> Collection[str]:
        """Return the names of the models that clients reach without a version, in no order."""
        return self._newest.keys()

    def executing_models(self) -> list[Model]:
        """Return all versions that can have requests: the READY ones, and those that finish their last requests."""
        return [*self.ready_models(), *self.retiring]

    def with_steps(self, model: Model) -> list[Model]:
        """Return `model`, and if it is an ensemble the models of its steps and of theirs. Raises `ServingError`."""
        found = [model]
        for user in found:  # it grows meanwhile
            for step in () if user.spec.ensemble is None else user.spec.ensemble.steps:
                used = self.resolve(step.model_name, step.model_version, step.namespace)
                if used not in found:
                    found.append(used)
        return found

    def index(self, ready: bool = False) -> list[IndexItem]:
        """Return the repository index in the order of identifier and version; with `ready`, only READY versions.

        A version that cannot execute now is UNAVAILABLE, as it is for `Kernel.model_ready`. Models that are in several
        repositories are always listed, and never as READY (Triton).
        """
        return [item for identifier in self.identifiers() for item in self.index_of(identifier, ready)]

    def identifiers(self) -> list[str]:
        """Return the identifiers of all models that the index lists, in their order."""
        stated = (identifier for identifier in self._models if not self._is_gone(identifier))
        return sorted({*self._known, *stated, *self._broken, *self._duplicates})

    def _is_gone(self, identifier: str) -> bool:
        """Whether a model is no longer in the repositories, and all its versions are unloaded (Triton)."""
        return identifier not in self._known and all(
            entry.state is ModelState.UNAVAILABLE and entry.reason == UNLOADED
            for entry in self._models[identifier].values()
        )

    def index_of(self, identifier: str, ready: bool = False) -> list[IndexItem]:
        """Return the lines of the index about one model, see `index`."""
        name = self._name(identifier)
        versions = self._models.get(identifier)
        if identifier in self._duplicates:
            return [IndexItem(name, "", ModelState.UNAVAILABLE.value, DUPLICATE_REASON)]
        if versions:
            items: list[IndexItem] = []
            for number, entry in sorted(versions.items()):
                state = self._state(entry)
                if not ready or state is ModelState.READY:
                    items.append(IndexItem(name, str(number), state.value, entry.reason or self._trouble(entry)))
            return items
        if ready:
            return []
        if identifier in self._broken:
            return [IndexItem(name, "", ModelState.UNAVAILABLE.value, self._broken[identifier])]
        return [IndexItem(name)]

    def wanted(self) -> list[IndexItem]:
        """Return the lines of the index about versions that serve, or that should and do not.

        Models that nobody has loaded, and versions that were unloaded on request, are not among them.
        """
        stated = sorted({*self._models, *self._broken, *self._duplicates})
        return [
            item
            for identifier in stated
            for item in self.index_of(identifier)
            if item.state and item.reason != UNLOADED
        ]

    def all_ready(self) -> bool:
        """Whether every version that should be loaded is READY and has a living instance.

        Versions that were unloaded on request do not count, nor do folders without a valid configuration (Triton's
        strict readiness).
        """
        if self._lacking:
            return False
        for versions in self._models.values():
            for entry in versions.values():
                if entry.state is ModelState.READY:
                    if entry.model is not None and not self.can_execute(entry.model):
                        return False
                elif entry.reason != UNLOADED:
                    return False
        return True

    def can_execute(self, model: Model) -> bool:
        """Whether a version that serves can execute now: it has an instance, and so has the model of each step."""
        return model.ready and not self._lacking_step(model)

    def _lacking_step(self, model: Model) -> str:
        """Return the name of the first step's model that cannot execute now; "" if there is none."""
        for step in () if model.spec.ensemble is None else model.spec.ensemble.steps:
            try:
                able = self.can_execute(self.resolve(step.model_name, step.model_version, step.namespace))
            except ServingError:
                able = False
            if not able:
                return step.model_name
        return ""

    def _state(self, entry: VersionEntry) -> ModelState:
        if entry.state is ModelState.READY and entry.model is not None and not self.can_execute(entry.model):
            return ModelState.UNAVAILABLE
        return entry.state

    def _trouble(self, entry: VersionEntry) -> str:
        """Return the reason why a version that serves cannot execute now; "" if it can."""
        if entry.model is None:
            return ""
        lacking = self._lacking_step(entry.model) if entry.state is ModelState.READY else ""
        return f"model '{lacking}' of a step cannot execute now" if lacking else entry.model.trouble


def model_identifier(namespace: str, name: str) -> str:
    """Return the unique name of a model in the server, in Triton's format; `namespace` is empty without namespacing."""
    return f"{namespace}::{name}" if namespace else name


def _share_spec(model: Model, versions: Iterable[VersionEntry]) -> None:
    """Give `model` the specification of another version if they are equal: what fits one then fits the other."""
    for entry in versions:
        if entry.model is not None and entry.model is not model and entry.model.spec == model.spec:
            model.spec = entry.model.spec
            return


def _ready(versions: Mapping[int, VersionEntry]) -> list[Model]:
    """Return the versions that serve, ascending."""
    return [
        entry.model
        for _, entry in sorted(versions.items())
        if entry.state is ModelState.READY and entry.model is not None
    ]


def parse_version(text: str) -> int:
    """Return the number of a version string. Raises `InvalidArgument` with Triton's text.

    Triton reads it with C++'s `stol`, which accepts white space before the number and any text after it.
    """
    found = _NUMBER.match(text)
    if found is None or len(found[1].lstrip("+-0")) > 19 or not -(2**63) <= int(found[1]) < 2**63:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    number = int(found[1])
    if number < 0:  # 0 is not refused here: Triton looks for such a version
        raise InvalidArgument(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return number

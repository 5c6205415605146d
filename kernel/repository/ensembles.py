"""Which ensembles use which models, and whether an ensemble can be loaded with the models that serve.

An ensemble is loaded after the models of its steps. When such a model is replaced, the ensemble is checked against the
new one; when it is unloaded, so is the ensemble, and it comes back with the model. Texts are Triton's
(model_repository_manager.cc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.check_steps import check_steps
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import BadConfig, InvalidArgument, ModelLoadFailed, ServingError
from kernel.serving.catalog import ModelState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from kernel.repository.layout import ModelFolder
    from kernel.repository.override import OverrideFolder
    from kernel.serving.catalog import Catalog

#: `model_version` of a step that uses the newest version.
_NEWEST = -1


class CircularEnsembles(BadConfig):
    """An ensemble is, directly or through others, a step of itself."""

    def __init__(self, first: str, last: str) -> None:
        super().__init__(f"circular dependency between ensembles: {first} -> ... -> {last} -> {first}")


class TrackedEnsemble(msgspec.Struct, eq=False):
    """An ensemble that serves, or that will serve again as soon as its models do."""

    folder: ModelFolder
    #: The names of the models of its steps.
    parts: tuple[str, ...]
    #: The configuration of a load request, if it had one, and its files.
    config_override: str | None = None
    files: OverrideFolder | None = None


def parts_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the models of an ensemble's steps; empty for other models."""
    return tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


class Ensembles:
    """The ensembles of a server. Changed by the lifecycle only."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._tracked: dict[str, TrackedEnsemble] = {}
        #: Model name → why its last load failed; a load that succeeds removes it.
        self._failures: dict[str, ServingError] = {}
        #: Ensembles that are being loaded, by identifier, and whether a model of a step has changed meanwhile.
        self.loading: dict[str, bool] = {}
        #: Names of the models that were asked for, not only loaded as a part of an ensemble.
        self.requested: set[str] = set()

    # ---- what the lifecycle reports ----------------------------------------------------------

    def note_result(self, name: str, error: ServingError | None) -> None:
        """A load of the model `name` has ended."""
        if error is None:
            self._failures.pop(name, None)
        else:
            self._failures[name] = error

    def track(self, ensemble: TrackedEnsemble) -> TrackedEnsemble | None:
        """Keep an ensemble up to date with its models from now on. Returns what was tracked before in its place."""
        former = self._tracked.get(ensemble.folder.identifier)
        self._tracked[ensemble.folder.identifier] = ensemble
        return former

    def forget(self, identifier: str) -> TrackedEnsemble | None:
        """Do not load an ensemble again with its models: it was unloaded on request. Returns it."""
        return self._tracked.pop(identifier, None)

    # ---- who needs whom ----------------------------------------------------------------------

    def users_of(self, name: str) -> list[TrackedEnsemble]:
        """Return the ensembles with a step of the model `name`."""
        return [each for _, each in sorted(self._tracked.items()) if name in each.parts]

    def serves(self, ensemble: TrackedEnsemble) -> bool:
        """Whether a version of the ensemble is ready."""
        versions = self._catalog.versions(ensemble.folder.identifier)
        return any(entry.state is ModelState.READY for entry in versions.values())

    def has_another(self, ensemble: TrackedEnsemble, name: str) -> bool:
        """Whether a model `name` serves in the ensemble's namespace, or as the only one; for one that was unloaded."""
        try:
            self._catalog.resolve(name, "", ensemble.folder.namespace)
        except ServingError:
            return False
        return True

    def find(self, identifier: str) -> TrackedEnsemble | None:
        return self._tracked.get(identifier)

    def unneeded_parts(self, ensemble: TrackedEnsemble) -> list[str]:
        """Return the models that were loaded only because `ensemble`, which was forgotten, needs them."""
        return [name for name in ensemble.parts if name not in self.requested and not self.users_of(name)]

    # ---- checks ------------------------------------------------------------------------------

    def connected(self, config: ModelConfig, namespace: str = "") -> ModelConfig:
        """Return the configuration of an ensemble after it was checked against the models that serve.

        The ensemble is decoupled if a model of it is. `namespace` is its repository if repositories are namespaces.
        Raises `ServingError`.
        """
        models: dict[str, ModelConfig] = {}
        for step in config.ensemble_scheduling.step:
            models[step.model_name] = self._config_of(config.name, step.model_name, step.model_version, namespace)
        result = ModelConfig()
        result.CopyFrom(config)
        result.model_transaction_policy.decoupled = check_steps(config, models)
        return result

    def _config_of(self, ensemble: str, name: str, version: int, namespace: str) -> ModelConfig:
        """Return the configuration of a step's model, which serves. Raises `ServingError`."""
        try:
            newest = self._catalog.resolve(name, "", namespace)
        except ServingError:
            raise self._unavailable(ensemble, name) from None
        if version == _NEWEST:
            return newest.config
        try:
            self._catalog.resolve(name, str(version), namespace)
        except ServingError:
            raise InvalidArgument(
                f"ensemble '{ensemble}' depends on '{name}' whose required version {version} is not loaded."
            ) from None
        return newest.config  # as in Triton, which compares with the newest version

    def _unavailable(self, ensemble: str, name: str) -> ServingError:
        failure = self._failures.get(name)
        if not isinstance(failure, ModelLoadFailed):  # it does not exist, or its configuration cannot be read
            return InvalidArgument(f"ensemble {ensemble} contains models that are not available or ambiguous: {name}")
        _, _, reason = failure.message.partition(f"load failed for model '{name}': ")
        if reason.startswith("version "):
            return InvalidArgument(
                f"ensemble '{ensemble}' depends on '{name}' which has no loaded version. Model '{name}' loading failed "
                f"with error: {reason.removesuffix(chr(10))}"
            )
        return InvalidArgument(
            f"ensemble '{ensemble}' depends on '{name}' which is not valid. Model '{name}' failed with error: "
            f"{reason.removesuffix(chr(10))}"
        )


def in_order(parts: Mapping[str, Collection[str]]) -> list[str]:
    """Return the names of ensembles, each after those that are steps of it. In a circle the order is arbitrary."""
    ordered: dict[str, None] = {}
    entered: set[str] = set()

    def visit(names: Iterable[str]) -> None:
        for name in names:
            if name in parts and name not in entered:
                entered.add(name)
                visit(parts[name])
                ordered[name] = None

    visit(parts)
    return list(ordered)

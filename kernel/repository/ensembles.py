"""Which ensembles use which models, and whether an ensemble can be loaded with the models that serve.

An ensemble is loaded after the models of its steps. When such a model is replaced, the ensemble is checked against the
new one; when it is unloaded, so is the ensemble, and it comes back with the model. Texts are Triton's
(model_repository_manager.cc). `Composition` does it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.config.check_ensemble import check_steps
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.load import from_pbtxt
from kernel.errors import (
    BadConfig,
    InternalError,
    InvalidArgument,
    ModelLoadFailed,
    ServingError,
    failing_as,
)
from kernel.file_threads import in_file_thread
from kernel.repository.local import read_config
from kernel.serving.catalog import ModelState, model_identifier

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from kernel.repository.layout import ModelFolder
    from kernel.repository.override import OverrideFolder
    from kernel.repository.repositories import RepositoryListing
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


logger = logging.getLogger(__name__)

#: Every configuration of an ensemble contains this word; most others do not, and need not be parsed to know it.
_MARK = b"ensemble"


class LoadRequest(msgspec.Struct, frozen=True):
    """What is asked for with the load of a model."""

    config_override: str | None = None
    files: OverrideFolder | None = None
    #: The ensembles for which the model is loaded, outermost first.
    path: tuple[str, ...] = ()
    #: Whether the models of an ensemble's steps are loaded, too, if they are new or have changed.
    with_parts: bool = True
    #: Load an ensemble again although it has not changed itself.
    again: bool = False


class ModelLoader(Protocol):
    """Loads and unloads single models. Implemented by `kernel.repository.lifecycle.Lifecycle`."""

    def load_model(self, folder: ModelFolder, request: LoadRequest) -> Awaitable[None]:
        """Load the versions of one model. Raises `ServingError`."""

    def unload_model(self, identifier: str) -> Awaitable[None]:
        """Stop serving a model's versions now. What is tracked of an ensemble stays."""

    def identifiers_of(self, name: str) -> list[str]:
        """Return the identifiers of the models called `name` that were ever loaded or tried."""


class Composition:
    """What the lifecycle does about ensembles."""

    def __init__(
        self,
        catalog: Catalog,
        loader: ModelLoader,
        listing: RepositoryListing,
        read: Callable[[str], bytes] = read_config,
    ) -> None:
        """`read` returns the content of a configuration that was listed. It blocks."""
        self._read = read
        self.ensembles = Ensembles(catalog)
        self._loader = loader
        self._listing = listing

    # ---- while a model is loaded -------------------------------------------------------------

    async def connect(self, folder: ModelFolder, config: ModelConfig, request: LoadRequest) -> ModelConfig:
        """Load the models of an ensemble's steps, and return its configuration, checked against them.

        Raises `ModelLoadFailed`.
        """
        try:
            if request.with_parts:
                await self._load_parts(folder, config, request)
            return self.ensembles.connected(config, folder.namespace)
        except ServingError as error:
            raise ModelLoadFailed(f"load failed for model '{folder.identifier}': {error.message}\n") from error

    async def _load_parts(self, folder: ModelFolder, config: ModelConfig, request: LoadRequest) -> None:
        """Load the models of the steps. Raises `CircularEnsembles`; other failures are found when they are checked."""
        path = (*request.path, folder.name)
        names = parts_of(config)
        for name in names:
            if name in path:
                raise CircularEnsembles(name, folder.name)
        results = await asyncio.gather(
            *(self._load_part(name, path, folder.namespace) for name in names), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ServingError):
                raise result
            if isinstance(result, CircularEnsembles):
                raise result

    async def _load_part(self, name: str, path: tuple[str, ...], namespace: str) -> None:
        """Load the model of a step: that of the ensemble's own repository, or without it all of that name."""
        found = (await self._listing.scan_for(name)).models
        own = found.get(model_identifier(namespace, name))
        for folder in [own] if own is not None else found.values():
            try:
                await self._loader.load_model(folder, LoadRequest(path=path))
            except ModelLoadFailed as error:
                if isinstance(error.__cause__, CircularEnsembles):
                    raise error.__cause__ from None
                raise

    # ---- at the start, and when the repositories are polled ----------------------------------

    async def split(
        self, folders: Iterable[ModelFolder], config_name: str
    ) -> tuple[list[ModelFolder], list[ModelFolder]]:
        """Return the models that are not ensembles, and the ensembles, each after those that are steps of it."""
        given = list(folders)
        parts = await in_file_thread(parts_by_name, given, config_name, self._read)
        by_name: dict[str, list[ModelFolder]] = {}
        for folder in given:
            if folder.name in parts:
                by_name.setdefault(folder.name, []).append(folder)
        ensembles = [folder for name in in_order(parts) for folder in by_name[name]]
        return [folder for folder in given if folder.name not in parts], ensembles

    # ---- after a model has changed -----------------------------------------------------------

    async def changed(self, name: str) -> None:
        """Versions of the model `name` were replaced or added: load the ensembles again that use it.

        One that no longer fits is unloaded, as in Triton.
        """
        for ensemble in self.ensembles.users_of(name):
            if ensemble.folder.identifier in self.ensembles.loading:
                self.ensembles.loading[ensemble.folder.identifier] = True
                continue
            await self._load_again(ensemble)

    async def _load_again(self, ensemble: TrackedEnsemble) -> None:
        try:
            await self._loader.load_model(
                ensemble.folder,
                LoadRequest(ensemble.config_override, ensemble.files, with_parts=False, again=True),
            )
        except ServingError:  # which the load has logged
            await self._loader.unload_model(ensemble.folder.identifier)

    async def unloaded(self, name: str) -> None:
        """The model `name` was unloaded: unload the ensembles that use it. They come back with it."""
        for ensemble in self.ensembles.users_of(name):
            if not self.ensembles.serves(ensemble):
                continue
            if self.ensembles.has_another(ensemble, name):  # its own, or another repository's
                await self._load_again(ensemble)
                continue
            logger.warning(
                "ensemble %s contains models that are not available or ambiguous: %s", ensemble.folder.name, name
            )
            await self._loader.unload_model(ensemble.folder.identifier)

    async def forget(self, identifier: str) -> TrackedEnsemble | None:
        """An ensemble was unloaded on request: do not load it again with its models. Returns it."""
        ensemble = self.ensembles.forget(identifier)
        await self._release(ensemble)
        return ensemble

    async def track(self, folder: ModelFolder, config: ModelConfig, request: LoadRequest) -> None:
        """Keep an ensemble that serves up to date with its models."""
        if request.again:
            return
        if request.files is not None:
            request.files.retain()
        former = self.ensembles.track(TrackedEnsemble(folder, parts_of(config), request.config_override, request.files))
        await self._release(former)

    async def _release(self, ensemble: TrackedEnsemble | None) -> None:
        if ensemble is not None and ensemble.files is not None:
            await in_file_thread(ensemble.files.release)

    async def unload_unneeded(self, ensemble: TrackedEnsemble) -> None:
        """Unload the models that were loaded only for `ensemble`, which was unloaded, and those of their steps."""
        for name in self.ensembles.unneeded_parts(ensemble):
            for identifier in self._loader.identifiers_of(name):
                part = await self.forget(identifier)
                await self._loader.unload_model(identifier)
                if part is not None:
                    await self.unload_unneeded(part)


def parts_by_name(
    folders: Iterable[ModelFolder], config_name: str, read: Callable[[str], bytes] = read_config
) -> dict[str, tuple[str, ...]]:
    """Return name → models of the steps, of the ensembles among `folders`. Blocks.

    `read` returns the content of a configuration.

    A configuration that cannot be read, in whatever way, counts as one of a model, not of an ensemble: its load reports
    what is wrong.
    """
    found: dict[str, tuple[str, ...]] = {}
    for folder in folders:
        path = folder.config_path(config_name)
        try:
            with failing_as(lambda error: InternalError(str(error)), passes=ServingError):
                content = b"" if path is None else read(path)
                parts = parts_of(from_pbtxt(content, path or "")) if _MARK in content else ()
        except ServingError:  # as above
            continue
        if parts:
            found[folder.name] = parts
    return found

"""Loads the models of an ensemble's steps before it, and keeps ensembles up to date when such models change."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.config.load import from_pbtxt
from kernel.errors import ModelLoadFailed, ServingError
from kernel.files.file_threads import in_file_thread
from kernel.repository.ensembles import CircularEnsembles, Ensembles, TrackedEnsemble, in_order, parts_of
from kernel.repository.local import read_config
from kernel.serving.catalog import model_identifier

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.repository.layout import ModelFolder
    from kernel.repository.listing import RepositoryListing
    from kernel.repository.override import OverrideFolder
    from kernel.serving.catalog import Catalog

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
            if self.ensembles.has_another(ensemble, name):  # its own, or that of another repository
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
            content = b"" if path is None else read(path)
            parts = parts_of(from_pbtxt(content, path or "")) if _MARK in content else ()
        except Exception:  # as above
            continue
        if parts:
            found[folder.name] = parts
    return found

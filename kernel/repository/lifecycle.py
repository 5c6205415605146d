"""Carries loads and unloads out: which models, in what order, and the swap of versions in the catalog.

A load is all or nothing over the versions of a model. A version that serves goes on serving until the
new one is ready, and stays where the new one fails. Loads of different models run at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from kernel.errors import InternalError, ModelLoadFailed, ServerStopping, ServingError, Unavailable
from kernel.repository.layout import RepositoryContents, check_model_name, known_names, overriding_folder
from kernel.repository.loading import InstanceUpdate, LoadedVersion, VersionLoader
from kernel.repository.local import list_names, list_repository
from kernel.repository.override import OverrideFolder, UnusableParameters, parse_load_parameters
from kernel.repository.source import ModelSource, scan
from kernel.serving.catalog import UNLOADED, ModelState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.loop.clock import Clock
    from kernel.repository.layout import ModelFolder
    from kernel.repository.placement import InstanceKeeper
    from kernel.repository.settings import LifecycleSettings
    from kernel.serving.catalog import Catalog, IndexItem
    from kernel.serving.model import SchedulerFactory

logger = logging.getLogger(__name__)


class Lifecycle:
    """Loads and unloads models. Implements `kernel.serving.kernel.RepositoryControl`."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        schedule: SchedulerFactory,
        new_keeper: Callable[[], InstanceKeeper],
        settings: LifecycleSettings,
    ) -> None:
        self._catalog = catalog
        self._settings = settings
        self._loader = VersionLoader(clock, schedule, new_keeper, settings)
        #: What serves, by identifier and version.
        self._loaded: dict[str, dict[int, LoadedVersion]] = {}
        #: What each model was loaded from; None where a client overrode it.
        self._sources: dict[str, ModelFolder | None] = {}
        #: Identifiers that were ever asked to load, by name.
        self._identifiers: dict[str, set[str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._background: set[asyncio.Task[None]] = set()

    # ---- start and stop ----------------------------------------------------------------------

    async def start(self, names: Iterable[str] = ()) -> list[str]:
        """Load the models of the start; returns the names of those that failed, whose reasons are in
        the catalog."""
        found = await self._scan()
        wanted = list(names) if self._settings.explicit else ["*"]
        if wanted == ["*"]:
            failed = list(found.duplicates)
            folders = list(found.models.values())
        else:
            failed = [name for name in wanted if not found.named(name)]
            folders = [folder for name in wanted for folder in found.named(name)]
        for name in failed:
            logger.error("failed to load '%s': %s", name, _why_not_there(name, found))
        failed += await self._load_all(folders)
        if self._settings.poll_s:
            self._run(self._poll_for_ever())
        return sorted(set(failed))

    async def poll(self) -> None:
        """Load what is new or has changed in the repositories, and unload what is gone (poll mode)."""
        try:
            found = await self._scan()
        except ServingError as error:
            logger.error("failed to poll model repository: %s", error.message)
            return
        for identifier in self._loaded.keys() - found.models.keys():
            await self._unload(identifier)
        await self._load_all(found.models.values())

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_s)
            await self.poll()

    async def _load_all(self, folders: Iterable[ModelFolder]) -> list[str]:
        """Load models at the same time; returns the names of those that failed."""
        failed: list[str] = []

        async def load(folder: ModelFolder) -> None:
            try:
                await self._load(folder)
            except ServingError as error:
                failed.append(folder.name)
                logger.error("failed to load '%s': %s", folder.identifier, error.message.strip())

        async with asyncio.TaskGroup() as tasks:
            for folder in folders:
                tasks.create_task(load(folder))
        return failed

    async def close(self, *, at_once: bool = False) -> None:
        """End every worker, `at_once` without finalizing models. What is still unanswered is answered
        with an error."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        versions = [loaded for versions in self._loaded.values() for loaded in versions.values()]
        self._loaded.clear()
        for loaded in versions:
            loaded.model.close(ServerStopping(""))
        await asyncio.gather(*(loaded.stop(at_once=at_once) for loaded in versions))

    # ---- RepositoryControl -------------------------------------------------------------------

    async def index(self, ready: bool = False) -> list[IndexItem]:
        """Return the repository index, with what is in the repositories now. Raises `InternalError`."""
        await self._look()
        return self._catalog.index(ready)

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Load a model, from what the request brings or from the repositories. Raises `ServingError`.

        Whoever gives up waiting does not end the load.
        """
        self._check_explicit()
        check_model_name(name)
        try:
            given = parse_load_parameters(parameters or {})
        except UnusableParameters as error:
            raise _not_polled(name, error) from error
        if given.files:
            await self._apart(self._load_files(name, given.files, given.config))
            return
        await self._look()
        found = await asyncio.to_thread(
            scan, self._settings.repositories, namespacing=self._settings.namespacing, only=name
        )
        if not found.models:
            raise _not_polled(name, _why_not_there(name, found))
        await self._apart(self._load_each(found.models.values(), given.config))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload every model called `name`. Without ensembles no model depends on another."""
        self._check_explicit()
        for identifier in sorted(self._identifiers.get(name, ())):
            await self._unload(identifier)

    def _check_explicit(self) -> None:
        if not self._settings.explicit:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")

    # ---- what there is -----------------------------------------------------------------------

    async def _look(self) -> None:
        """Read which models the repositories have, by their names alone. Raises `InternalError`."""

        def names() -> dict[str, list[str]]:
            return {str(path): list_names(str(path)) for path in self._settings.repositories}

        self._catalog.set_known(*known_names(await asyncio.to_thread(names), namespacing=self._settings.namespacing))

    async def _scan(self) -> RepositoryContents:
        """Read the repositories with everything in them. Raises `InternalError`."""
        namespacing = self._settings.namespacing
        found = await asyncio.to_thread(scan, self._settings.repositories, namespacing=namespacing)
        names = {identifier: folder.name for identifier, folder in found.models.items()}
        self._catalog.set_known(names, found.duplicates)
        return found

    # ---- loading -----------------------------------------------------------------------------

    async def _load_each(self, folders: Iterable[ModelFolder], config: str | None) -> None:
        """Load models of one name, which are several only with namespacing. Raises `ServingError`."""
        results = await asyncio.gather(*(self._load(folder, config) for folder in folders), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        texts = [error.message for error in errors if isinstance(error, ModelLoadFailed)]
        if len(errors) > 1 and len(texts) == len(errors):
            raise ModelLoadFailed("".join(texts))
        if errors:
            raise errors[0]

    async def _load_files(self, name: str, files: dict[str, bytes], config: str | None) -> None:
        """Load a model from files that a client sent instead of a repository. Raises `ServingError`."""
        try:
            override = await asyncio.to_thread(OverrideFolder, files)
            try:
                entries = await asyncio.to_thread(list_repository, override.path)
                await self._load(overriding_folder(name, override.path, entries), config, override)
            finally:
                await asyncio.to_thread(override.release)
        except UnusableParameters as error:
            raise _not_polled(name, error) from error

    async def _load(
        self, folder: ModelFolder, config_override: str | None = None, files: OverrideFolder | None = None
    ) -> None:
        """Load every version that the policy chooses. Raises `ModelLoadFailed` or `InternalError`."""
        identifier = folder.identifier
        self._identifiers.setdefault(folder.name, set()).add(identifier)
        async with self._lock(identifier):
            if config_override is None and self._sources.get(identifier) == folder:
                return  # nothing has changed since it was loaded
            settings = self._settings
            source = ModelSource(
                folder, gpu_count=settings.gpu_count, auto_complete=settings.auto_complete,
                config_name=settings.config_name,
            )  # fmt: skip
            try:
                config = await asyncio.to_thread(source.read, config_override)
            except ServingError as error:
                self._broken(folder, error, config_override)
                raise _not_polled(folder.name, error) from error
            try:
                versions = source.versions(config)
            except ServingError as error:
                self._broken(folder, error, config_override)
                raise ModelLoadFailed(f"load failed for model '{identifier}': {error.message}\n") from error
            for line in source.warnings(config):
                logger.warning("model '%s': %s", identifier, line)
            self._catalog.set_broken(identifier, None)
            await self._load_versions(source, config, versions, files)
            self._sources[identifier] = folder if config_override is None else None

    def _broken(self, folder: ModelFolder, error: ServingError, config_override: str | None) -> None:
        """Show why nothing of a model can be loaded, unless a client's own configuration is to blame."""
        if config_override is None and folder.identifier not in self._loaded:
            self._catalog.set_broken(folder.identifier, f"{error.code.title}: {error.message}")

    async def _load_versions(
        self, source: ModelSource, config: ModelConfig, versions: list[int], files: OverrideFolder | None
    ) -> None:
        identifier = source.folder.identifier
        serving = self._loaded.get(identifier, {})
        origin = source.origin(config)
        staying = {v: serving[v] for v in versions if v in serving and not serving[v].origin.needs_reload(origin, v)}
        for version in versions:
            if version not in serving:
                self._catalog.set_state(identifier, version, ModelState.LOADING)
        results = await asyncio.gather(
            *(
                self._loader.update(staying[version], source, config)
                if version in staying
                else self._loader.load(source, config, version)
                for version in versions
            ),
            return_exceptions=True,
        )
        found = dict(zip(versions, results, strict=True))
        loaded = {v: result for v, result in found.items() if isinstance(result, LoadedVersion)}
        updates = [result for result in results if isinstance(result, InstanceUpdate)]
        errors = {v: result for v, result in found.items() if isinstance(result, BaseException)}
        if errors:
            for entry in loaded.values():
                self._run(self._retire(identifier, entry, forget=False))
            for update in updates:
                self._run(update.abandon())
            self._versions_failed(identifier, errors, list(loaded), serving, staying)
        for entry in loaded.values():
            entry.use(files)
        for update in updates:
            self._commit(update)
        self._publish(identifier, loaded | staying, serving)

    def _commit(self, update: InstanceUpdate) -> None:
        """Let a version that serves have other instances; what its former ones execute is finished."""
        former = update.commit()
        for keeper in former:
            self._run(_end(keeper))
        logger.info(
            "successfully updated the instances of '%s' version %d: %d new, %d gone",
            update.version.model.name, update.version.model.version, len(update.new), len(former),
        )  # fmt: skip

    def _versions_failed(
        self,
        identifier: str,
        errors: dict[int, BaseException],
        others: list[int],
        serving: dict[int, LoadedVersion],
        staying: dict[int, LoadedVersion],
    ) -> None:
        """Note why versions failed; what served before still does. Always raises."""
        text = ""
        for version, error in sorted(errors.items()):
            if not isinstance(error, ServingError):
                raise error  # a bug, or the load was cancelled
            reason = f"{error.code.title}: {error.message}"
            state = ModelState.READY if version in staying else ModelState.UNAVAILABLE
            text += f"version {version} is at {state.value} state: {reason};"
            if version in staying:
                self._catalog.set_state(identifier, version, state, reason, staying[version].model)
            elif version not in serving:
                self._catalog.set_state(identifier, version, state, reason)
        for version in others:
            if version not in serving:
                self._catalog.set_state(identifier, version, ModelState.UNAVAILABLE, UNLOADED)
        raise ModelLoadFailed(f"load failed for model '{identifier}': {text}\n")

    def _publish(self, identifier: str, ready: dict[int, LoadedVersion], serving: dict[int, LoadedVersion]) -> None:
        """Let the versions serve that are ready now, and retire those that did before and are not among them."""
        self._loaded[identifier] = ready
        for version, entry in ready.items():
            self._catalog.set_state(identifier, version, ModelState.READY, "", entry.model)
        for version, entry in serving.items():
            if ready.get(version) is entry:
                continue
            if version not in ready:
                self._catalog.set_state(identifier, version, ModelState.UNLOADING, "", entry.model)
            self._run(self._retire(identifier, entry, forget=version not in ready))

    # ---- unloading ---------------------------------------------------------------------------

    async def _unload(self, identifier: str) -> None:
        """Take a model's versions away at once; requests in flight finish in the background."""
        async with self._lock(identifier):
            for version, loaded in self._loaded.pop(identifier, {}).items():
                self._catalog.set_state(identifier, version, ModelState.UNLOADING, "", loaded.model)
                self._run(self._retire(identifier, loaded, forget=True))
            self._sources.pop(identifier, None)

    async def _retire(self, identifier: str, loaded: LoadedVersion, *, forget: bool) -> None:
        """Let requests in flight finish, then end the workers; `forget` also marks the version unloaded."""
        model = loaded.model
        try:
            await model.drain()
        finally:
            model.close(Unavailable(f"model '{model.name}' was unloaded"))
            await loaded.stop()
        if forget:
            entry = self._catalog.entry(identifier, model.version)
            if entry is not None and entry.model is model:
                self._catalog.set_state(identifier, model.version, ModelState.UNAVAILABLE, UNLOADED)
            logger.info("successfully unloaded '%s' version %d", identifier, model.version)

    # ---- tasks -------------------------------------------------------------------------------

    def _lock(self, identifier: str) -> asyncio.Lock:
        return self._locks.setdefault(identifier, asyncio.Lock())

    async def _apart(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`, which goes on when the caller is cancelled, until the server closes."""
        await asyncio.shield(self._run(work))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background until it is done or the server closes."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited may have given up


async def _end(keeper: InstanceKeeper) -> None:
    """Let an instance finish what it has, then end its worker."""
    try:
        await keeper.retire()
    finally:
        await keeper.stop()


def _not_polled(name: str, reason: ServingError | str) -> InternalError:
    """Return what a client reads where no configuration was found or it was wrong; the log has the reason."""
    text = reason if isinstance(reason, str) else reason.message
    logger.error("Poll failed for model directory '%s': %s", name, text)
    return InternalError(f"failed to load '{name}', failed to poll from model repository")


def _why_not_there(name: str, found: RepositoryContents) -> str:
    if name in found.duplicates:
        return f"not unique across all model repositories: {', '.join(found.duplicates[name])}"
    return "model not found in any model repository."

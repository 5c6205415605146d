"""Loads and unloads models: chooses models and versions, and replaces versions in the catalog.

A load succeeds for all versions of a model or fails for all. The old versions serve until the new ones are
ready, and stay if the new ones fail. Different models load at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from kernel.errors import InternalError, ModelLoadFailed, NoDescriptorLeft, ServerStopping, ServingError, Unavailable
from kernel.repository.layout import RepositoryContents, check_model_name, known_names, overriding_folder
from kernel.repository.loading import InstanceUpdate, LoadedVersion, VersionLoader
from kernel.repository.local import list_names, list_repository
from kernel.repository.override import OverrideFolder, UnusableParameters, parse_load_parameters
from kernel.repository.retirement import Retirement
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
        self._retirement = Retirement(catalog, settings.unload_timeout_s)
        #: Identifier → version → the version that serves.
        self._loaded: dict[str, dict[int, LoadedVersion]] = {}
        #: Identifier → the folder that the model was loaded from; None if a client gave its files. A configuration that
        #: a client gave stays until the folder changes (Triton).
        self._sources: dict[str, ModelFolder | None] = {}
        #: Model name → all identifiers that were ever loaded or tried.
        self._identifiers: dict[str, set[str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._background: set[asyncio.Task[None]] = set()

    # ---- start and stop ----------------------------------------------------------------------

    async def start(self, names: Iterable[str] = ()) -> list[str]:
        """Load the models that are served from the start, and return the sorted names of those that failed.

        In explicit mode these are `names` (["*"] for all models), else all models. The catalog has the
        reasons of failures.
        """
        found = await self._scan()
        for path in found.misnamed:
            logger.warning("ignore model directory '%s': its name contains control characters", path)
        wanted = list(names) if self._settings.explicit else ["*"]
        if wanted == ["*"]:
            failed = list(found.duplicates)
            folders = list(found.models.values())
        else:
            failed = [name for name in wanted if not found.named(name)]
            folders = [folder for name in wanted for folder in found.named(name)]
        for name in failed:
            logger.error("failed to load '%s': %s", name, _not_found_reason(name, found))
        failed += await self._load_all(folders)
        if self._settings.poll_s:
            self._start_task(self._poll_forever())
        return sorted(set(failed))

    async def poll(self) -> None:
        """Load new and changed models of the repositories, and unload removed ones (poll mode)."""
        try:
            found = await self._scan()
        except ServingError as error:
            logger.error("failed to poll model repository: %s", error.message)
            return
        for identifier in self._loaded.keys() - found.models.keys():
            await self._unload(identifier)
        await self._load_all(found.models.values())

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_s)
            await self.poll()

    async def _load_all(self, folders: Iterable[ModelFolder]) -> list[str]:
        """Load models at the same time, and return the names of those that failed."""
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
        """End every worker; `at_once` does not finalize models. Unfinished requests fail with `ServerStopping`."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        versions = [loaded for versions in self._loaded.values() for loaded in versions.values()]
        self._loaded.clear()
        for loaded in versions:
            loaded.model.close(ServerStopping(""))
        await asyncio.gather(
            *(loaded.stop(at_once=at_once) for loaded in versions), self._retirement.close(at_once=at_once)
        )

    # ---- RepositoryControl -------------------------------------------------------------------

    async def index(self, ready: bool = False) -> list[IndexItem]:
        """Return the index of the repositories as they are now. Raises `InternalError`."""
        await self._update_names()
        return self._catalog.index(ready)

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Load a model from the repositories, or from the files in `parameters`. Raises `ServingError`.

        The load continues if the caller is cancelled.
        """
        self._check_explicit()
        check_model_name(name)
        try:
            given = parse_load_parameters(parameters or {})
        except UnusableParameters as error:
            raise _poll_failed(name, error) from error
        if given.files:
            await self._uncancelled(self._load_files(name, given.files, given.config))
            return
        await self._update_names()
        found = await asyncio.to_thread(
            scan, self._settings.repositories, namespacing=self._settings.namespacing, only=name
        )
        if not found.models:
            raise _poll_failed(name, _not_found_reason(name, found))
        await self._uncancelled(self._load_each(found.models.values(), given.config))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload every model called `name`. No model has dependents, because ensembles are not supported yet."""
        self._check_explicit()
        for identifier in sorted(self._identifiers.get(name, ())):
            await self._unload(identifier)

    def _check_explicit(self) -> None:
        if not self._settings.explicit:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")

    # ---- listing the repositories ------------------------------------------------------------

    async def _update_names(self) -> None:
        """Read the names of the models in the repositories into the catalog. Raises `InternalError`."""

        def names() -> dict[str, list[str]]:
            return {str(path): list_names(str(path)) for path in self._settings.repositories}

        self._catalog.set_known(*known_names(await asyncio.to_thread(names), namespacing=self._settings.namespacing))

    async def _scan(self) -> RepositoryContents:
        """List the repositories with all files, and put the names into the catalog. Raises `InternalError`."""
        namespacing = self._settings.namespacing
        found = await asyncio.to_thread(scan, self._settings.repositories, namespacing=namespacing)
        names = {identifier: folder.name for identifier, folder in found.models.items()}
        self._catalog.set_known(names, found.duplicates)
        return found

    # ---- loading -----------------------------------------------------------------------------

    async def _load_each(self, folders: Iterable[ModelFolder], config: str | None) -> None:
        """Load the models of one name; only with namespacing there are several. Raises `ServingError`."""
        results = await asyncio.gather(*(self._load(folder, config) for folder in folders), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        texts = [error.message for error in errors if isinstance(error, ModelLoadFailed)]
        if len(errors) > 1 and len(texts) == len(errors):
            raise ModelLoadFailed("".join(texts))
        if errors:
            raise errors[0]

    async def _load_files(self, name: str, files: dict[str, bytes | memoryview], config: str | None) -> None:
        """Load a model from the files of a load request. Raises `ServingError`."""
        try:
            override = await asyncio.to_thread(OverrideFolder, files)
            try:
                entries = await asyncio.to_thread(list_repository, override.path)
                await self._load(overriding_folder(name, override.path, entries), config, override)
            finally:
                await asyncio.to_thread(override.release)
        except UnusableParameters as error:
            raise _poll_failed(name, error) from error

    async def _load(
        self, folder: ModelFolder, config_override: str | None = None, files: OverrideFolder | None = None
    ) -> None:
        """Load every version that the version policy selects. Raises `ModelLoadFailed` or `InternalError`."""
        identifier = folder.identifier
        self._identifiers.setdefault(folder.name, set()).add(identifier)
        async with self._lock(identifier):
            if config_override is None and self._sources.get(identifier) == folder:
                return  # the folder has not changed since the last load
            settings = self._settings
            source = ModelSource(
                folder, gpu_count=settings.gpu_count, auto_complete=settings.auto_complete,
                config_name=settings.config_name,
            )  # fmt: skip
            try:
                config = await asyncio.to_thread(source.read, config_override)
            except ServingError as error:
                self._mark_broken(folder, error, config_override)
                raise _poll_failed(folder.name, error) from error
            try:
                versions = source.versions(config)
            except ServingError as error:
                self._mark_broken(folder, error, config_override)
                raise ModelLoadFailed(f"load failed for model '{identifier}': {error.message}\n") from error
            for line in source.warnings(config):
                logger.warning("model '%s': %s", identifier, line)
            self._catalog.set_broken(identifier, None)
            await self._load_versions(source, config, versions, files)
            self._sources[identifier] = folder if files is None else None

    def _mark_broken(self, folder: ModelFolder, error: ServingError, config_override: str | None) -> None:
        """Put the error into the index, unless the model serves or the configuration came from a client."""
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
                self._start_task(self._retire(identifier, entry, mark_unloaded=False))
            for update in updates:
                self._start_task(update.abandon())
            self._raise_failure(identifier, errors, list(loaded), serving, staying)
        for entry in loaded.values():
            entry.hold_files(files)
        for update in updates:
            self._commit(update)
        self._publish(identifier, loaded | staying, serving)

    def _commit(self, update: InstanceUpdate) -> None:
        """Change the instances of a serving version. Removed instances finish their batches."""
        removed = update.commit()
        for keeper in removed:
            self._start_task(self._retirement.end_instance(keeper))
        logger.info(
            "successfully updated the instances of '%s' version %d: %d new, %d removed",
            update.version.model.name, update.version.model.version, len(update.new), len(removed),
        )  # fmt: skip

    def _raise_failure(
        self,
        identifier: str,
        errors: dict[int, BaseException],
        others: list[int],
        serving: dict[int, LoadedVersion],
        staying: dict[int, LoadedVersion],
    ) -> None:
        """Put the errors of failed versions into the catalog, and raise `ModelLoadFailed`. Old versions still serve."""
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
        if any(isinstance(error, NoDescriptorLeft) for error in errors.values()):
            raise NoDescriptorLeft
        raise ModelLoadFailed(f"load failed for model '{identifier}': {text}\n")

    def _publish(self, identifier: str, ready: dict[int, LoadedVersion], serving: dict[int, LoadedVersion]) -> None:
        """Let the versions in `ready` serve, and retire the versions in `serving` that are not in `ready`."""
        self._loaded[identifier] = ready
        for version, entry in ready.items():
            self._catalog.set_state(identifier, version, ModelState.READY, "", entry.model)
        for version, entry in serving.items():
            if ready.get(version) is entry:
                continue
            if version not in ready:
                self._catalog.set_state(identifier, version, ModelState.UNLOADING, "", entry.model)
            self._start_task(self._retire(identifier, entry, mark_unloaded=version not in ready))

    # ---- unloading ---------------------------------------------------------------------------

    async def _unload(self, identifier: str) -> None:
        """Stop serving a model's versions now; requests in flight finish in the background."""
        async with self._lock(identifier):
            for version, loaded in self._loaded.pop(identifier, {}).items():
                self._catalog.set_state(identifier, version, ModelState.UNLOADING, "", loaded.model)
                self._start_task(self._retire(identifier, loaded, mark_unloaded=True))
            self._sources.pop(identifier, None)

    async def _retire(self, identifier: str, loaded: LoadedVersion, *, mark_unloaded: bool) -> None:
        """Wait for requests in flight, then end the workers. `mark_unloaded` shows the version as unloaded."""
        model = loaded.model
        await self._retirement.end_version(loaded)
        if mark_unloaded:
            entry = self._catalog.entry(identifier, model.version)
            if entry is not None and entry.model is model:
                self._catalog.set_state(identifier, model.version, ModelState.UNAVAILABLE, UNLOADED)
            logger.info("successfully unloaded '%s' version %d", identifier, model.version)

    # ---- tasks -------------------------------------------------------------------------------

    def _lock(self, identifier: str) -> asyncio.Lock:
        return self._locks.setdefault(identifier, asyncio.Lock())

    async def _uncancelled(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`. It continues if the caller is cancelled, until `close` cancels it."""
        await asyncio.shield(self._start_task(work))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work` in the background; `close` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: a cancelled caller no longer waits for it


def _poll_failed(name: str, reason: ServingError | str) -> ServingError:
    """Log why a configuration is missing or wrong, and return Triton's general error for the client."""
    text = reason if isinstance(reason, str) else reason.message
    logger.error("Poll failed for model directory '%s': %s", name, text)
    if isinstance(reason, NoDescriptorLeft):
        return NoDescriptorLeft()
    return InternalError(f"failed to load '{name}', failed to poll from model repository")


def _not_found_reason(name: str, found: RepositoryContents) -> str:
    if name in found.duplicates:
        return f"not unique across all model repositories: {', '.join(found.duplicates[name])}"
    return "model not found in any model repository."

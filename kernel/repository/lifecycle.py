"""Loads and unloads models: chooses models and versions, and replaces versions in the catalog.

A load succeeds for all versions of a model or fails for all. The old versions serve until the new ones are
ready, and stay if the new ones fail. Different models load at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from kernel.background import BackgroundTasks
from kernel.config.model_parameters import model_parameters
from kernel.errors import ModelLoadFailed, ServerStopping, ServingError, Unavailable, failing_as
from kernel.file_threads import in_file_thread
from kernel.repository.autoscaling import RESTART_PAUSE_S, Autoscaling, ServingVersion
from kernel.repository.ensembles import Composition, LoadRequest
from kernel.repository.layout import check_model_name, overriding_folder
from kernel.repository.load_failures import (
    UnexpectedFailure,
    all_loaded,
    log_failure,
    log_not_found,
    log_oddities,
    not_found_reason,
    note_failure,
    poll_failed,
    unexpected_failure,
)
from kernel.repository.loading import InstanceUpdate, LoadedVersion, VersionLoader, hold_origin
from kernel.repository.local import list_repository
from kernel.repository.opening import open_model
from kernel.repository.override import OverrideFolder, UnusableParameters, parse_load_parameters
from kernel.repository.polling import RepositoryLoads, RepositoryPolling
from kernel.repository.repositories import Repositories, RepositoryListing, TrafficFiles
from kernel.repository.retirement import Retirement, finalized
from kernel.repository.running_loads import LoadEnded, RunningLoads
from kernel.server_parts import ServerPart
from kernel.serving.catalog import UNLOADED, ModelState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.loop.clock import Clock
    from kernel.repository.layout import ModelFolder
    from kernel.repository.load_progress import LoadStep
    from kernel.repository.opening import OpenedModel
    from kernel.repository.placement import InstanceKeeper
    from kernel.repository.settings import LifecycleSettings
    from kernel.repository.source import ModelSource
    from kernel.server_parts import RepositoryFigures
    from kernel.serving.catalog import Catalog, IndexItem
    from kernel.serving.model import Model, SchedulerFactory

logger = logging.getLogger(__name__)

#: How long an unload waits for a load of the same model, in seconds. A load that takes longer is ended.
UNLOAD_WAIT_S = 5.0


class Lifecycle(ServerPart):
    """Loads and unloads models. A part of the server. Implements `kernel.serving.interface.RepositoryControl`."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        schedule: SchedulerFactory,
        new_keeper: Callable[[], InstanceKeeper],
        settings: LifecycleSettings,
        on_retired: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_retired` is called after the workers of a version have ended that was unloaded or replaced."""
        self._catalog = catalog
        self.settings = settings
        self.backends = settings.backends
        self.clock = clock
        self.loader = VersionLoader(clock, schedule, new_keeper, settings, catalog.note_pending)
        self._progress = self.loader.progress
        self._retirement = Retirement(catalog, settings.unload_timeout_s)
        self.repositories = Repositories.of(settings, self._progress.copies)
        self._listing = RepositoryListing(catalog, self.repositories)
        self.traffic_files = TrafficFiles(self.repositories.read_config)
        self._composition = Composition(catalog, self, self._listing, self.repositories.read_config)
        self._ensembles = self._composition.ensembles
        self._loads = RepositoryLoads(self, self._composition, self._progress, settings, clock, self._serving)
        #: Identifier → version → the version that serves.
        self._loaded: dict[str, dict[int, LoadedVersion]] = {}
        self._sources = self._loads.sources
        #: Model name → all identifiers that were ever loaded or tried.
        self._identifiers: dict[str, set[str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self.running_loads = RunningLoads()
        self.background = BackgroundTasks()
        self.polling = RepositoryPolling(
            self.poll, self.repositories.slowest_listing, settings.poll_s, self.background.failures
        )
        self._on_retired = on_retired

    # ---- start and stop ----------------------------------------------------------------------

    async def start(self, names: Iterable[str] = ()) -> list[str]:
        """Load the models that are served from the start, and return the sorted names of those that failed.

        In explicit mode these are `names` (["*"] for all models), else all models. The catalog has the
        reasons of failures.
        """
        wanted = list(names) if self.settings.explicit else ["*"]
        found = await self._listing.scan(wanted)
        log_oddities(found)
        await self.traffic_files.read(found, found.traffic if wanted != ["*"] else None)
        if wanted == ["*"]:
            failed = list(found.duplicates)
            folders = list(found.models.values())
        else:
            failed = [name for name in wanted if not found.named(name)]
            folders = [folder for name in wanted for folder in found.named(name)]
        for name in failed:
            log_not_found(name, found)
        self._ensembles.requested |= {folder.name for folder in folders}
        self._progress.begin(len(folders), self.clock.now_ns())
        failed += await self._loads.load_all(folders, with_parts=wanted != ["*"])
        self._progress.close()
        if self.settings.poll_s:
            self.background.keep("the poll of the repositories", self.polling.run, self.settings.poll_s)
        return sorted(set(failed))

    @property
    def loading(self) -> LoadStep | None:
        """How far the loading of the models at the start is; None before and after it."""
        return self._progress.step(self.clock.now_ns())

    async def poll(self) -> None:
        """Load new and changed models, and unload removed ones.

        Models of a repository that cannot be read now stay as they are; its error is raised at the end.
        """
        found, error = await self._listing.poll()
        await self.traffic_files.read(found)
        for identifier in self._loaded.keys() - found.models.keys():
            await self._composition.forget(identifier)
            await self.unload_model(identifier)
        await self._loads.load_changed(found.models.values())
        if error is not None:
            raise error

    def _serving(self, identifier: str) -> list[Model]:
        return [loaded.model for loaded in self._loaded.get(identifier, {}).values()]

    async def close(self, *, at_once: bool = False) -> None:
        """End every worker; `at_once` does not finalize models. Unfinished requests fail with `ServerStopping`."""
        await self.background.close()
        versions = [loaded for versions in self._loaded.values() for loaded in versions.values()]
        self._loaded.clear()
        for loaded in versions:
            loaded.model.close(ServerStopping(""))
        await asyncio.gather(
            *(loaded.stop(at_once=at_once) for loaded in versions), self._retirement.close(at_once=at_once)
        )
        await self.repositories.close()

    def figures(self) -> RepositoryFigures:
        return self.polling.figures()

    # ---- RepositoryControl -------------------------------------------------------------------

    async def index(self, ready: bool = False) -> list[IndexItem]:
        """Return the index of the repositories as they are now. Raises `InternalError`."""
        await self._listing.update_names()
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
            raise poll_failed(name, error) from error
        if given.files:
            await self.background.uncancelled(self._load_files(name, given.files, given.config))
            return
        await self._listing.update_names()
        found = await self._listing.scan_for(name)
        if not found.models:
            raise poll_failed(name, not_found_reason(name, found))
        await self.traffic_files.read(found, [name])
        self._ensembles.requested.add(name)
        loads = [self.load_model(folder, LoadRequest(given.config)) for folder in found.models.values()]
        await self.background.uncancelled(all_loaded(loads))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload every model called `name`, and the ensembles with a step of it.

        With `unload_dependents` also the models that were loaded only as steps of an ensemble called `name`.
        """
        self._check_explicit()
        self._ensembles.requested.discard(name)
        for identifier in self.identifiers_of(name):
            ensemble = await self._composition.forget(identifier)
            await self.unload_model(identifier)
            if ensemble is not None:  # nobody waits for it any longer
                self._catalog.set_broken(identifier, None)
            if ensemble is not None and unload_dependents:
                await self._composition.unload_unneeded(ensemble)

    def _check_explicit(self) -> None:
        if not self.settings.explicit:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")

    def load_for_rollout(self, name: str, ended: Callable[[str], None]) -> bool:
        """Load what is new of a model in explicit mode. See `kernel.traffic.rollouts.ModelLoads`."""
        if not self.settings.explicit:
            if not self.settings.poll_s:
                ended("with --model-control-mode=none the server loads versions only at its start")
            return False

        async def load() -> None:
            try:
                await self.load(name)
            except ServingError as error:
                ended(error.message)
            else:
                ended("")

        self.background.start(load())
        return True

    # ---- loading -----------------------------------------------------------------------------

    async def _load_files(self, name: str, files: dict[str, bytes | memoryview], config: str | None) -> None:
        """Load a model from the files of a load request. Raises `ServingError`."""
        try:
            override = await in_file_thread(OverrideFolder, files)
            try:
                entries = await in_file_thread(list_repository, override.path)
                self._ensembles.requested.add(name)
                folder = overriding_folder(name, override.path, entries)
                await all_loaded([self.load_model(folder, LoadRequest(config, override))])
            finally:
                await in_file_thread(override.release)
        except UnusableParameters as error:
            raise poll_failed(name, error) from error

    # ---- kernel.repository.ensembles.ModelLoader -------------------------------------------

    def identifiers_of(self, name: str) -> list[str]:
        return sorted(self._identifiers.get(name, ()))

    async def load_model(self, folder: ModelFolder, request: LoadRequest) -> None:
        """Load every version that the version policy selects, then the ensembles that use the model. Raises as they."""
        identifier, ensembles, before = folder.identifier, self._ensembles, self._serving(folder.identifier)
        self._identifiers.setdefault(folder.name, set()).add(identifier)
        mark = self.running_loads.mark(identifier)
        async with self._lock(identifier):
            try:
                self.running_loads.check(identifier, mark)
                await self._load_guarded(folder, request)
            except ServingError as error:
                ensembles.note_result(folder.name, error)
                await log_failure(folder, error, self.settings.backends())
                raise
            finally:
                outdated = ensembles.loading.pop(identifier, False)
        ensembles.note_result(folder.name, None)
        if outdated and (ensemble := ensembles.find(identifier)) is not None:
            again = LoadRequest(ensemble.config_override, ensemble.files, with_parts=False, again=True)
            await self.load_model(ensemble.folder, again)
        if self._serving(identifier) != before:
            await self._composition.changed(folder.name)

    async def _load_guarded(self, folder: ModelFolder, request: LoadRequest) -> None:
        """Load a model. Raises only `ServingError`: whatever happens to one model must not end the work on others."""
        try:
            with failing_as(partial(unexpected_failure, folder.identifier), passes=ServingError):
                await self._load(folder, request)
        except UnexpectedFailure as failure:
            self._mark_broken(folder, failure, request.config_override, is_model=False)
            raise ModelLoadFailed(f"load failed for model '{folder.identifier}': {failure.message}\n") from failure

    async def _load(self, folder: ModelFolder, request: LoadRequest) -> None:
        identifier, override = folder.identifier, request.config_override
        unchanged = override is None and self._sources.get(identifier) == folder and not request.again
        if unchanged:
            ensemble = self._ensembles.find(identifier)
            if ensemble is None or not request.with_parts:
                return  # the folder has not changed since the last load
            override = ensemble.config_override
        try:
            of_request = request.files is not None
            opening = open_model(folder, override, self.settings, self.repositories, files_of_request=of_request)
            opened = await self.running_loads.run_one(identifier, opening)
        except LoadEnded as error:
            self._mark_broken(folder, error, override, is_model=False)
            raise ModelLoadFailed(f"load failed for model '{identifier}': {error.message}\n") from error
        except ServingError as error:
            self._mark_broken(folder, error, override, is_model=False)
            raise poll_failed(folder.name, error) from error
        async with opened:
            await self._load_opened(opened, folder, request, override, unchanged)

    async def _load_opened(
        self, opened: OpenedModel, folder: ModelFolder, request: LoadRequest, override: str | None, unchanged: bool
    ) -> None:
        identifier, source, config = folder.identifier, opened.source, opened.config
        try:
            if config.HasField("ensemble_scheduling"):
                self._ensembles.loading[identifier] = False
                config = opened.config = await self._composition.connect(folder, config, request)
                parts_changed, self._ensembles.loading[identifier] = self._ensembles.loading[identifier], False
                if unchanged and not parts_changed:
                    return  # neither it nor a model of its steps has changed
            versions = self.traffic_files.versions(folder.name, source.versions(config), folder.versions)
        except ModelLoadFailed as error:
            self._mark_broken(folder, error.__cause__ or error, override, is_model=False)
            if identifier not in self._loaded and override is None and not request.again:
                await self._composition.track(folder, config, request)  # it is loaded as soon as its models fit
            raise
        except ServingError as error:
            self._mark_broken(folder, error, override)
            raise ModelLoadFailed(f"load failed for model '{identifier}': {error.message}\n") from error
        for line in source.warnings(config):
            logger.warning("model '%s': %s", identifier, line)
        self._catalog.set_broken(identifier, None)
        trials = self._trials_for_later(folder, versions, request)
        await self._load_versions(opened, [each for each in versions if each not in trials], request)
        self._sources[identifier] = folder if request.files is None and not trials else None
        if trials:
            self.background.start(self._load_trials(folder))
        if config.HasField("ensemble_scheduling"):
            await self._composition.track(folder, config, request)

    def _trials_for_later(self, folder: ModelFolder, versions: list[int], request: LoadRequest) -> list[int]:
        """Return the versions on trial if no other version serves yet: the others do not wait for them.

        So a server that was killed while one of them loads serves the stable version as soon as possible.
        """
        if folder.identifier in self._loaded or request.config_override is not None or request.files is not None:
            return []
        trials = [version for version in versions if self.traffic_files.only_trials(folder.name, [version])]
        return trials if len(trials) < len(versions) else []

    async def _load_trials(self, folder: ModelFolder) -> None:
        """Load what a load has left out, unless the model is unloaded first."""
        with contextlib.suppress(ServingError):  # it is in the log, and in the state of the rollout
            await self.load_model(folder, LoadRequest())

    def _mark_broken(
        self, folder: ModelFolder, error: BaseException, override: str | None, *, is_model: bool = True
    ) -> None:
        """Put the error into the index, unless the model serves or the configuration came from a client."""
        if override is None and folder.identifier not in self._loaded and isinstance(error, ServingError):
            self._catalog.set_broken(folder.identifier, f"{error.code.title}: {error.message}", is_model=is_model)

    async def _load_versions(self, opened: OpenedModel, versions: list[int], request: LoadRequest) -> None:
        source, config, identifier = opened.source, opened.config, opened.source.folder.identifier
        serving = self._loaded.get(identifier, {})
        origin = source.origin(config)
        staying = {v: serving[v] for v in versions if v in serving and not serving[v].origin.needs_reload(origin, v)}
        if request.again or config.HasField("ensemble_scheduling"):
            staying = {}  # the ensemble has not changed, but perhaps what it is made of
        for version in versions:
            if version not in serving:
                self._catalog.set_state(identifier, version, ModelState.LOADING)
        results = await self.running_loads.run(
            identifier,
            [
                self.loader.update(staying[version], source, config)
                if version in staying
                else self.loader.load(source, config, version)
                for version in versions
            ],
        )
        found = dict(zip(versions, results, strict=True))
        loaded = {v: result for v, result in found.items() if isinstance(result, LoadedVersion)}
        updates = [result for result in results if isinstance(result, InstanceUpdate)]
        errors = {v: result for v, result in found.items() if isinstance(result, BaseException)}
        others = loaded.keys() | (staying.keys() - errors.keys())
        if (
            errors
            and others
            and not errors.keys() & serving.keys()
            and self.traffic_files.only_trials(source.name, errors)
        ):
            failure = note_failure(self._catalog, identifier, errors, [], serving, staying)
            logger.error("the other versions serve: %s", failure.message.strip())
        elif errors:
            for entry in loaded.values():
                self.background.start(self._retire(identifier, entry, mark_unloaded=False))
            for update in updates:
                self.background.start(update.abandon())
            raise note_failure(self._catalog, identifier, errors, list(loaded), serving, staying)
        for former in hold_origin(loaded.values(), staying.values(), request.files or opened.copy, opened.agents):
            self.background.start(former.release())
        ends = [end for update in updates for end in self._commit(update)]
        self._publish(identifier, loaded | staying, serving)
        for entry in loaded.values():
            self._autoscale(identifier, entry, source)
        await finalized(ends)

    def _commit(self, update: InstanceUpdate) -> list[asyncio.Task[None]]:
        """Change the instances of a version. Removed ones end in the returned tasks, or after their sequences."""
        ends = [self.background.start(self._retirement.end_instance(keeper)) for keeper in update.commit()]
        return [] if update.version.model.live_sequences else ends  # whose clients may wait for this load

    def _autoscale(self, identifier: str, version: LoadedVersion, source: ModelSource) -> None:
        """Change the number of instances with the load as long as the version serves, if the model asks for it."""
        settings = model_parameters(version.model.config).autoscale
        if settings is not None:
            lock, number = self._lock(identifier), version.model.version
            serving = ServingVersion(
                version, source, lock, lambda: self._loaded.get(identifier, {}).get(number) is version
            )
            scaling = Autoscaling(serving, settings, self._scale, self._commit, self.clock)
            self.background.keep(f"the autoscaling of model '{identifier}'", scaling.run, RESTART_PAUSE_S)

    async def _scale(self, version: LoadedVersion, source: ModelSource, count: int) -> InstanceUpdate:
        load = self.loader.scale(version, source, count)
        return await self.running_loads.run_one(source.folder.identifier, load)

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
            self.background.start(self._retire(identifier, entry, mark_unloaded=version not in ready))

    # ---- unloading ---------------------------------------------------------------------------

    async def unload_model(self, identifier: str) -> None:
        """Stop serving a model's versions now; requests in flight finish in the background.

        Ensembles with a step of it are unloaded as well. Loads of it that were asked for before may end within
        `UNLOAD_WAIT_S`; then they are ended.
        """
        names = {loaded.model.name for loaded in self._loaded.get(identifier, {}).values()}
        async with self.running_loads.ended_after(UNLOAD_WAIT_S, identifier, self._lock(identifier)):
            for version, loaded in self._loaded.pop(identifier, {}).items():
                self._catalog.set_state(identifier, version, ModelState.UNLOADING, "", loaded.model)
                self.background.start(self._retire(identifier, loaded, mark_unloaded=True))
            self._sources.pop(identifier, None)
        for name in names:
            await self._composition.unloaded(name)

    async def _retire(self, identifier: str, loaded: LoadedVersion, *, mark_unloaded: bool) -> None:
        """Wait for requests in flight, then end the workers. `mark_unloaded` shows the version as unloaded."""
        model = loaded.model
        await self._retirement.end_version(loaded)
        self._on_retired()
        if mark_unloaded:
            entry = self._catalog.entry(identifier, model.version)
            if entry is not None and entry.model is model:
                self._catalog.set_state(identifier, model.version, ModelState.UNAVAILABLE, UNLOADED)
            logger.info("successfully unloaded '%s' version %d", identifier, model.version)

    def _lock(self, identifier: str) -> asyncio.Lock:
        return self._locks.setdefault(identifier, asyncio.Lock())

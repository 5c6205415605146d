"""Carries loads and unloads out: configuration, workers, and the swap of versions in the catalog.

A load is all or nothing over the versions of a model. A version that serves goes on serving until the
new one is ready, and stays where the new one fails. Loads of different models run at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.catalog import ModelState
from kernel.config.to_json import to_json
from kernel.errors import InternalError, LoadFailed, ServerStopping, ServingError, Unavailable, Unsupported
from kernel.model import Model
from kernel.repository.layout import DUPLICATE_REASON, RepositoryContents, check_model_name
from kernel.repository.limits import ignored_settings, refuse_unsupported
from kernel.repository.placement import plan_instances
from kernel.repository.source import ModelSource, scan

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from pathlib import Path

    from kernel.catalog import Catalog, IndexItem
    from kernel.clock import Clock
    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.model import SchedulerFactory
    from kernel.repository.layout import ModelFolder
    from kernel.repository.placement import InstanceKeeper, InstancePlan

logger = logging.getLogger(__name__)

#: How many models are loaded at the same time at start (--model-load-thread-count in Triton).
LOADS_AT_ONCE = 4


class LifecycleSettings(msgspec.Struct, frozen=True):
    """How the repository is used, from the command line."""

    repositories: tuple[Path, ...]
    #: Whether clients may load and unload, and only `--load-model` is loaded at start.
    explicit: bool = False
    auto_complete: bool = True
    gpu_count: int = 0


class _Loaded(msgspec.Struct):
    """A version with what keeps it running."""

    model: Model
    keepers: list[InstanceKeeper]


class Lifecycle:
    """Loads and unloads models. Implements `kernel.router.RepositoryControl`."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        schedule: SchedulerFactory,
        new_keeper: Callable[[], InstanceKeeper],
        settings: LifecycleSettings,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._schedule = schedule
        self._new_keeper = new_keeper
        self._settings = settings
        self._found = RepositoryContents({}, {})
        self._loaded: dict[str, dict[int, _Loaded]] = {}
        #: What each model was loaded from; None where a client overrode its configuration.
        self._sources: dict[str, ModelFolder | None] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._background: set[asyncio.Task[None]] = set()

    # ---- start and stop ----------------------------------------------------------------------

    async def start(self, names: Iterable[str] = ()) -> list[str]:
        """Load the models of the start; returns the names of those that failed, whose reasons are in
        the catalog."""
        await self._scan()
        wanted = list(names) if self._settings.explicit else ["*"]
        chosen = list(self._found.models) if wanted == ["*"] else wanted
        gate = asyncio.Semaphore(LOADS_AT_ONCE)
        failed = list(self._found.duplicates)

        async def load(name: str) -> None:
            async with gate:
                try:
                    await self._load(name)
                except ServingError as error:
                    failed.append(name)
                    logger.error("failed to load '%s': %s", name, error.message.strip())

        async with asyncio.TaskGroup() as tasks:
            for name in chosen:
                tasks.create_task(load(name))
        return sorted(set(failed))

    async def close(self, *, at_once: bool = False) -> None:
        """End every worker, `at_once` without finalizing models. What is still unanswered is answered
        with an error."""
        versions = [loaded for versions in self._loaded.values() for loaded in versions.values()]
        self._loaded.clear()
        for loaded in versions:
            loaded.model.close(ServerStopping(""))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(keeper.stop(at_once=at_once) for loaded in versions for keeper in loaded.keepers))

    # ---- RepositoryControl -------------------------------------------------------------------

    def index(self, ready: bool = False) -> list[IndexItem]:
        return self._catalog.index(ready)

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        self._check_explicit()
        check_model_name(name)
        override = None
        for key, value in (parameters or {}).items():
            if key != "config":
                raise Unsupported(f"load parameter '{key}' is not supported: only 'config' is")
            override = str(value)
        await self._scan()
        await self._load(name, override)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self._check_explicit()
        async with self._lock(name):
            for version, loaded in self._loaded.pop(name, {}).items():
                self._catalog.set_state(name, version, ModelState.UNLOADING, "", loaded.model)
                self._run(self._retire(loaded, forget=True))
            self._sources.pop(name, None)

    def _check_explicit(self) -> None:
        if not self._settings.explicit:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")

    # ---- loading -----------------------------------------------------------------------------

    async def _scan(self) -> None:
        """Read which models there are. Raises `InternalError`."""
        self._found = await asyncio.to_thread(scan, self._settings.repositories)
        self._catalog.set_known({*self._found.models, *self._found.duplicates})
        for name in self._found.duplicates:
            self._catalog.set_broken(name, DUPLICATE_REASON)

    async def _load(self, name: str, override: str | None = None) -> None:
        """Load every version that the policy chooses. Raises `LoadFailed` or `InternalError`."""
        async with self._lock(name):
            folder = self._found.models.get(name)
            if folder is None:
                raise InternalError(f"failed to load '{name}', failed to poll from model repository")
            if override is None and self._sources.get(name) == folder:
                return  # nothing has changed since it was loaded
            source = ModelSource(folder, gpu_count=self._settings.gpu_count, auto_complete=self._settings.auto_complete)
            try:
                config = await asyncio.to_thread(source.read, override)
                versions = source.versions(config)
            except ServingError as error:
                self._config_failed(name, error)
                raise InternalError(f"failed to load '{name}', failed to poll from model repository") from error
            for line in source.warnings(config):
                logger.warning("model '%s': %s", name, line)
            self._catalog.set_broken(name, None)
            await self._load_versions(source, config, versions)
            self._sources[name] = folder if override is None else None

    def _config_failed(self, name: str, error: ServingError) -> None:
        """No version can be loaded; versions that serve go on serving."""
        logger.error("model '%s': %s", name, error.message)
        if name not in self._loaded:
            self._catalog.set_broken(name, f"{error.code.title}: {error.message}")

    async def _load_versions(self, source: ModelSource, config: ModelConfig, versions: list[int]) -> None:
        name = source.name
        serving = self._loaded.get(name, {})
        for version in versions:
            if version not in serving:
                self._catalog.set_state(name, version, ModelState.LOADING)
        results = await asyncio.gather(
            *(self._load_version(source, config, version) for version in versions), return_exceptions=True
        )
        found = dict(zip(versions, results, strict=True))
        loaded = {v: result for v, result in found.items() if isinstance(result, _Loaded)}
        errors = {v: result for v, result in found.items() if isinstance(result, BaseException)}
        if errors:
            for entry in loaded.values():
                self._run(self._retire(entry, forget=False))
            self._versions_failed(name, errors, list(loaded), serving)
        self._publish(name, loaded, serving)

    def _versions_failed(
        self, name: str, errors: dict[int, BaseException], others: list[int], serving: dict[int, _Loaded]
    ) -> None:
        """Note why versions failed; what served before still does. Always raises."""
        text = ""
        for version, error in sorted(errors.items()):
            if not isinstance(error, ServingError):
                raise error  # a bug, or the load was cancelled
            reason = f"{error.code.title}: {error.message}"
            text += f"version {version} is at UNAVAILABLE state: {reason};\n"
            if version not in serving:
                self._catalog.set_state(name, version, ModelState.UNAVAILABLE, reason)
        for version in others:
            if version not in serving:
                self._catalog.set_state(name, version, ModelState.UNAVAILABLE, "unloaded")
        raise LoadFailed(f"load failed for model '{name}': {text}")

    def _publish(self, name: str, loaded: dict[int, _Loaded], serving: dict[int, _Loaded]) -> None:
        """Let the new versions serve, and retire the old ones."""
        self._loaded[name] = loaded
        for version, entry in loaded.items():
            self._catalog.set_state(name, version, ModelState.READY, "", entry.model)
        for version, entry in serving.items():
            if version not in loaded:
                self._catalog.set_state(name, version, ModelState.UNLOADING, "", entry.model)
            self._run(self._retire(entry, forget=version not in loaded))

    async def _load_version(self, source: ModelSource, config: ModelConfig, version: int) -> _Loaded:
        """Return a loaded version that takes requests. Raises `ServingError`; no worker is left then."""
        started_ns = self._clock.now_ns()
        refuse_unsupported(config)
        keepers: list[InstanceKeeper] = [self._new_keeper()]
        try:
            await keepers[0].start(source.name)
            folder = str(source.path)
            if self._settings.auto_complete:
                config = source.complete(config, await keepers[0].complete(to_json(config), folder, version))
            prepared = source.prepare(config)
            refuse_unsupported(prepared.config)
            plans = plan_instances(prepared.config, folder, version)
            keepers += [self._new_keeper() for _ in plans[1:]]
            await self._load_instances(keepers, plans, prepared.json)
        except BaseException:
            await asyncio.gather(*(keeper.stop() for keeper in keepers))
            raise
        for phrase in ignored_settings(prepared.config):
            logger.warning("model '%s': %s has no effect in this version", source.name, phrase)
        model = Model(prepared.spec, prepared.config, version, self._schedule, self._clock)
        model.statistics.load_ns = self._clock.now_ns() - started_ns
        model.start()
        for keeper in keepers:
            keeper.join(model)
        logger.info("successfully loaded '%s' version %d", source.name, version)
        return _Loaded(model, keepers)

    async def _load_instances(self, keepers: list[InstanceKeeper], plans: list[InstancePlan], config: str) -> None:
        """Load all instances at the same time; the first error is raised when all have ended."""
        results = await asyncio.gather(
            *(keeper.load(plan, config) for keeper, plan in zip(keepers, plans, strict=True)),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    # ---- unloading ---------------------------------------------------------------------------

    async def _retire(self, loaded: _Loaded, *, forget: bool) -> None:
        """Let requests in flight finish, then end the workers; `forget` also marks the version unloaded."""
        model = loaded.model
        await model.drain()
        model.close(Unavailable(f"model '{model.name}' was unloaded"))
        await asyncio.gather(*(keeper.stop() for keeper in loaded.keepers))
        if forget:
            entry = self._catalog.entry(model.name, model.version)
            if entry is not None and entry.model is model:
                self._catalog.set_state(model.name, model.version, ModelState.UNAVAILABLE, "unloaded")
            logger.info("successfully unloaded '%s' version %d", model.name, model.version)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background until it is done or the server closes."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

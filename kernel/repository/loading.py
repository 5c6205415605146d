"""Loads one version of a model: starts workers, completes the configuration, starts the scheduler, warms up.

The settings limit how many versions load at the same time, and how often a failed load is repeated. A failed
load leaves no worker running. The instances of a version can be changed while it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING

import msgspec

from kernel.config.check import check_before_completion
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.model_parameters import autoscale_settings
from kernel.config.to_text import to_json
from kernel.errors import ServingError, Unavailable
from kernel.extensions import import_extensions
from kernel.file_threads import in_file_thread
from kernel.observe.log_lines import about_model
from kernel.repository.backend_config import backend_config
from kernel.repository.host_policy import policy_cpus
from kernel.repository.load_limit import LoadLimit
from kernel.repository.load_progress import LoadProgress
from kernel.repository.placement import match_instances, plan_instances, share_workers_on_gpus
from kernel.repository.running_loads import LoadReports, LongLoads
from kernel.repository.source import Origin, with_changes
from kernel.repository.unsupported import ignored_settings, refuse_batching_library, refuse_unsupported
from kernel.repository.warmup import warm_up
from kernel.repository.worker_needs import worker_needs
from kernel.serving.model import Model
from kernel.serving.sequence_model import loaded_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from kernel.loop.clock import Clock
    from kernel.repository.agents import ModelAgents
    from kernel.repository.held_folders import HeldFolder
    from kernel.repository.load_limit import LoadSlot
    from kernel.repository.placement import InstanceKeeper, InstancePlan
    from kernel.repository.settings import LifecycleSettings
    from kernel.repository.source import ModelSource, PreparedConfig
    from kernel.repository.worker_needs import WorkerNeeds
    from kernel.serving.model import SchedulerFactory

logger = logging.getLogger(__name__)


class LoadedInstance(msgspec.Struct, frozen=True, eq=False):
    """An instance of a loaded version."""

    plan: InstancePlan
    keeper: InstanceKeeper


class LoadedVersion(msgspec.Struct):
    """A version that can serve: the model and its instances."""

    model: Model
    origin: Origin
    #: In the order of the configuration.
    instances: list[LoadedInstance]
    #: The folder with the model's files, which restarted workers and new instances read again.
    path: str
    #: Which of the server's loads it is, from 1 on.
    load_number: int = 0
    #: That folder, if it is of a load request, or a copy of a model in a cloud.
    held: HeldFolder | None = None
    #: The repository agents of the load.
    agents: ModelAgents | None = None

    async def leave(self) -> None:
        """The version gets no new requests, and `stop` follows."""
        if self.agents is not None:
            await self.agents.leave()

    @property
    def serving_count(self) -> int:
        """How many instances are not passive."""
        return sum(not each.plan.passive for each in self.instances)

    async def released(self, limit_s: float) -> None:
        """Wait until no other model uses a tensor on a device of an instance, at most `limit_s` seconds."""
        await asyncio.gather(*(each.keeper.released(limit_s) for each in self.instances))

    async def stop(self, *, at_once: bool = False) -> None:
        """End the workers; `at_once` does not finalize the model. It can be called again if it was cancelled."""
        await asyncio.gather(*(each.keeper.stop(at_once=at_once) for each in self.instances))
        held, self.held = self.held, None
        if held is not None:
            await in_file_thread(held.release)
        agents, self.agents = self.agents, None
        if agents is not None:
            await agents.release()


def hold_origin(
    loaded: Collection[LoadedVersion],
    staying: Collection[LoadedVersion],
    held: HeldFolder | None,
    agents: ModelAgents,
) -> list[ModelAgents]:
    """Keep what the versions of a load need until `stop` has ended their workers: a folder, if any, and agents.

    A version that stays has not changed, and keeps its former folder. Returns the former agents of such versions; the
    caller releases them.
    """
    former = [version.agents for version in staying if version.agents is not None]
    for version in loaded:
        if held is not None:
            version.held = held
            held.retain()
    for version in (*loaded, *staying):
        version.agents = agents
        agents.retain()
    return former


class InstanceUpdate(msgspec.Struct, frozen=True):
    """A prepared change of the instances of a serving version. New instances are warm and take no batches yet.

    The owner calls either `commit` or `abandon`, once.
    """

    version: LoadedVersion
    origin: Origin
    prepared: PreparedConfig
    #: All instances after the change, in the order of the configuration.
    instances: list[LoadedInstance]
    #: The instances in `instances` that the version does not have yet.
    new: list[LoadedInstance]

    def commit(self) -> list[InstanceKeeper]:
        """Apply the change. Returns the keepers of removed instances; the caller calls their `leave` and `stop`."""
        version = self.version
        for each in self.new:
            if not each.plan.passive:
                each.keeper.serve()
        for each in self.instances:
            each.keeper.set_restart_config(self.prepared.json)
        former, version.instances = version.instances, self.instances
        version.origin = self.origin
        version.model.config = self.prepared.config
        removed = [each.keeper for each in former if each not in self.instances]
        logger.info(
            "successfully updated the instances of '%s' version %d: %d new, %d removed",
            version.model.name, version.model.version, len(self.new), len(removed),
        )  # fmt: skip
        return removed

    async def abandon(self) -> None:
        """End the new instances. The version stays unchanged."""
        self.version.model.on_change(self.version.model.config)
        await asyncio.gather(*(each.keeper.stop() for each in self.new))


class VersionLoader:
    """Loads versions of models, and changes the instances of loaded ones."""

    def __init__(
        self,
        clock: Clock,
        schedule: SchedulerFactory,
        new_keeper: Callable[[], InstanceKeeper],
        settings: LifecycleSettings,
        note_pending: Callable[[str, int, str], None],
    ) -> None:
        """`note_pending` shows what the load of a version waits for: by its model's identifier, its number, a text."""
        self._clock = clock
        self._note_pending = note_pending
        self._schedule = schedule
        self._new_keeper = new_keeper
        self._settings = settings
        self.gpus = settings.gpus
        self._load_limit = LoadLimit(settings.load_thread_count, clock)
        self.progress = LoadProgress()
        self._load_count = 0
        long_loads = LongLoads(settings.load_thread_count, settings.load_timeout_s, explicit=settings.explicit)
        self._reports = LoadReports(long_loads, clock)

    async def load(self, source: ModelSource, config: ModelConfig, version: int) -> LoadedVersion:
        """Load a version and return it; it takes requests. On `ServingError` its workers have ended."""
        identifier = source.folder.identifier
        async with self._turn(identifier, version) as slot:
            self.progress.loads(identifier, self._clock.now_ns())
            logger.info("loading: %s:%d", identifier, version)
            with about_model(source.name, version):
                return await self._load_with_retries(source, config, version, slot)

    @contextlib.asynccontextmanager
    async def _turn(self, identifier: str, version: int) -> AsyncIterator[LoadSlot]:
        """Wait for the turn of a load; it ends with the `async with` block. The log says if both take long."""
        with self._reports.of(identifier, version) as got_turn:
            async with self._load_limit.slot() as slot:
                got_turn()
                yield slot

    async def _load_with_retries(
        self, source: ModelSource, config: ModelConfig, version: int, slot: LoadSlot
    ) -> LoadedVersion:
        for attempt in range(self._settings.load_retry_count):
            try:
                return await self._load(source, config, version, slot)
            except ServingError as error:
                logger.error(
                    "failed to load '%s' version %d, attempt %d: %s",
                    source.name, version, attempt + 1, error.message.strip(),
                )  # fmt: skip
        return await self._load(source, config, version, slot)

    async def _load(self, source: ModelSource, config: ModelConfig, version: int, slot: LoadSlot) -> LoadedVersion:
        started_ns = self._clock.now_ns()
        refuse_unsupported(config)
        if config.HasField("ensemble_scheduling"):
            return await self._load_ensemble(source, config, version, started_ns)
        refuse_batching_library(config, source.folder.batching_library())
        await import_extensions(config)
        new_keeper = functools.partial(self._keeper_of, source.folder.identifier, version)
        slot.workers = keepers = [new_keeper()]
        self._load_count += 1
        load_number = self._load_count
        model: Model | None = None
        try:
            prepared = await self._prepare(source, config, version, keepers[0])
            count = _first_count(prepared.config)
            plans = await in_file_thread(self._plan, prepared.config, source, version, count, load_number)
            keepers += [new_keeper() for _ in plans[1:]]
            instances = [LoadedInstance(plan, keeper) for plan, keeper in zip(plans, keepers, strict=True)]
            await self._load_instances(instances, prepared.json)
            model = loaded_model(prepared.spec, prepared.config, version, self._schedule, self._clock)
            await self._extend(model, source)
            for line in model.statistics.configure(self._settings.metrics, prepared.config):
                logger.warning("model '%s': %s", source.name, line)
            model.start()
            await self._join(model, instances, source)
        except BaseException:
            if model is not None:
                model.close(Unavailable("the model was not loaded"))
            await asyncio.gather(*(keeper.stop() for keeper in keepers))
            raise
        for each in instances:
            if not each.plan.passive:
                each.keeper.serve()
        self._loaded(model, source, started_ns)
        return LoadedVersion(model, source.origin(config), instances, str(source.path), load_number)

    def _keeper_of(self, identifier: str, version: int) -> InstanceKeeper:
        """Return a keeper for an instance of a version that loads: the index shows what it waits for."""
        keeper = self._new_keeper()
        keeper.pending = functools.partial(self._note_pending, identifier, version)
        return keeper

    async def _load_ensemble(
        self, source: ModelSource, config: ModelConfig, version: int, started_ns: int
    ) -> LoadedVersion:
        """Load an ensemble, which was checked against the models of its steps and has no instances of its own."""
        prepared = await in_file_thread(source.prepare, config)
        spec = await in_file_thread(source.ensemble_spec, prepared, version)
        model = Model(spec, prepared.config, version, self._schedule, self._clock)
        await self._extend(model, source)
        for line in model.statistics.configure(self._settings.metrics, prepared.config):
            logger.warning("model '%s': %s", source.name, line)
        model.start()
        self._loaded(model, source, started_ns)
        return LoadedVersion(model, source.origin(config), [], str(source.path))

    async def _extend(self, model: Model, source: ModelSource) -> None:
        for extension in self._settings.extensions:
            await extension.extend(model, source.path)

    def _loaded(self, model: Model, source: ModelSource, started_ns: int) -> None:
        settings = self._settings
        for phrase in ignored_settings(model.config, cache=settings.has_cache, limiter=settings.has_limiter):
            logger.warning("model '%s': %s has no effect", source.name, phrase)
        model.statistics.load_ns = self._clock.now_ns() - started_ns
        logger.info("successfully loaded '%s' version %d", source.name, model.version)

    async def examine(self, source: ModelSource, config: ModelConfig, version: int) -> PreparedConfig:
        """Complete and check the configuration as `load` does, also against the model's files, without loading it.

        `config` is not for an ensemble. Raises `ServingError` if `load` would.
        """
        refuse_unsupported(config)
        refuse_batching_library(config, source.folder.batching_library())
        await import_extensions(config)
        keeper = self._new_keeper()
        try:
            with about_model(source.name, version):
                prepared = await self._prepare(source, config, version, keeper)
                settings = backend_config(self._settings.backend_configs, prepared.config.backend)
                await keeper.complete(prepared.json, str(source.path), version, settings, verify=True)
        finally:
            await keeper.stop()
        return prepared

    async def scale(self, version: LoadedVersion, source: ModelSource, count: int) -> InstanceUpdate:
        """Start the instances that `version` needs to have `count`, besides passive ones. As `update`."""
        model, config = version.model, ModelConfig()
        config.CopyFrom(model.config)
        async with self._turn(source.folder.identifier, model.version) as slot:
            with about_model(source.name, model.version):
                prepared = await in_file_thread(source.prepare, config)
                return await self._start_update(version, source, prepared, version.origin, count, slot)

    async def update(self, version: LoadedVersion, source: ModelSource, config: ModelConfig) -> InstanceUpdate:
        """Start the instances of `config` that `version` does not have. On `ServingError` they have ended."""
        model, source = version.model, source.within(version.path)
        async with self._turn(source.folder.identifier, model.version) as slot:
            with about_model(source.name, model.version):
                refuse_unsupported(config)
                prepared = await in_file_thread(source.prepare, with_changes(model.config, config))
                count = version.serving_count if autoscale_settings(prepared.config) is not None else None
                return await self._start_update(version, source, prepared, source.origin(config), count, slot)

    async def _start_update(
        self,
        version: LoadedVersion,
        source: ModelSource,
        prepared: PreparedConfig,
        origin: Origin,
        count: int | None,
        slot: LoadSlot,
    ) -> InstanceUpdate:
        instances = await in_file_thread(self._match, version, prepared.config, source, count)
        new = [each for each in instances if each not in version.instances]
        slot.workers = [each.keeper for each in new]
        update = InstanceUpdate(version, origin, prepared, instances, new)
        try:
            version.model.on_change(prepared.config)
            await self._load_instances(new, prepared.json)
            await self._join(version.model, new, source)
        except BaseException:
            await update.abandon()
            raise
        return update

    def _match(
        self, version: LoadedVersion, config: ModelConfig, source: ModelSource, count: int | None
    ) -> list[LoadedInstance]:
        """Return the instances for `config`: matching ones of `version`, and new ones to load. Blocks."""
        plans = self._plan(config, source, version.model.version, count, version.load_number)
        found = match_instances([each.plan for each in version.instances], plans)
        return [
            LoadedInstance(plan, self._new_keeper()) if index is None else version.instances[index]
            for plan, index in zip(plans, found, strict=True)
        ]

    async def _join(self, model: Model, instances: list[LoadedInstance], source: ModelSource) -> None:
        """Add the instances to `model` and run its warm-up on them. Raises `ServingError`."""
        joined = [each.keeper.join(model) for each in instances if not each.plan.passive]
        await warm_up(model, joined, source, self._clock, self._settings.load_timeout_s)

    async def _load_instances(self, instances: list[LoadedInstance], config: str) -> None:
        """Load all instances at the same time. Raises the first error after all loads have ended."""
        for each in instances:
            if each.plan.kind == "GPU":
                await self._settings.gpus.check_room(each.plan.name, each.plan.device_id)
        loads = (each.keeper.load(each.plan, config, len(instances)) for each in instances)
        results = await asyncio.gather(*loads, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _prepare(
        self, source: ModelSource, config: ModelConfig, version: int, keeper: InstanceKeeper
    ) -> PreparedConfig:
        """Start the first worker, and return the configuration as this worker completes it."""
        check_before_completion(config, source.gpus)
        # Configurations are read and written in threads: one of 256 KiB takes 250 ms. What follows one another is done
        # in one: to pass it to a thread and back takes as long as for a small model all that the thread does.
        text, needs = await in_file_thread(self._described, source, config, version)
        await keeper.start(source.name, needs)
        settings = backend_config(self._settings.backend_configs, config.backend)
        if source.is_on_gpu_by_default(config):
            config = await self._where_it_can_run(source, config, version, keeper)
            text = await in_file_thread(to_json, config)
        completed: str | None = None
        if self._settings.auto_complete:
            completed = await keeper.complete(text, str(source.path), version, settings)
        return await in_file_thread(_prepared, source, config, text, completed)

    def _described(self, source: ModelSource, config: ModelConfig, version: int) -> tuple[str, WorkerNeeds]:
        """Return the configuration in JSON, and what the workers need. Blocks. Raises `BadConfig`."""
        return to_json(config), self._needs(source, config, version)

    async def _where_it_can_run(
        self, source: ModelSource, config: ModelConfig, version: int, keeper: InstanceKeeper
    ) -> ModelConfig:
        """Return the configuration with groups of KIND_AUTO on the CPU if the backend cannot use GPUs. Triton's server
        is built with all that its backends need; here a backend is what is installed, and its worker knows it."""
        gpus = self._settings.gpus
        obstacle = gpus.obstacle_of(config.backend)
        if obstacle is None:
            settings = backend_config(self._settings.backend_configs, config.backend)
            text = await in_file_thread(to_json, config)
            obstacle = await keeper.gpu_obstacle(text, str(source.path), version, settings)
            gpus.note(config.backend, obstacle)
        return await in_file_thread(source.without_gpus_for, config) if obstacle else config

    def _needs(self, source: ModelSource, config: ModelConfig, version: int) -> WorkerNeeds:
        """Return the needs of a version's workers. Blocks. Raises `BadConfig`."""
        environment = source.environment(config, version, installs=self._settings.installs_requirements)
        return worker_needs(config, str(source.path), environment, self._settings.gpus.visible, version)

    def _plan(
        self, config: ModelConfig, source: ModelSource, version: int, count: int | None, load_number: int
    ) -> list[InstancePlan]:
        """Return the plans of all instances, with the settings of the command line. Blocks.

        `count` is the number of instances that are not passive, if the configuration does not decide it.
        """
        gpus = self._settings.gpus.settings
        settings = backend_config(self._settings.backend_configs, config.backend)
        policies = self._settings.host_policies
        needs = self._needs(source, config, version)
        plans = [
            msgspec.structs.replace(
                plan,
                backend_config=settings,
                cpus=policy_cpus(policies.get(plan.host_policy, {})),
                needs=needs,
                device_pool_byte_size=gpus.pool_byte_size(plan.device_id) if plan.kind == "GPU" else 0,
            )
            for plan in plan_instances(config, str(source.path), version, count)
        ]
        return share_workers_on_gpus(plans, config, load_number) if gpus.threads else plans


def _prepared(source: ModelSource, config: ModelConfig, sent: str, completed: str | None) -> PreparedConfig:
    """Return the configuration, checked, as the worker that it was `sent` to has completed it; None if none has.

    Blocks. Raises `ServingError`.
    """
    prepared = source.prepare(config if completed is None else source.complete(config, completed, sent))
    refuse_unsupported(prepared.config)
    return prepared


def _first_count(config: ModelConfig) -> int | None:
    """Return how many instances a model with `naiad.autoscale` begins with; None without it."""
    scaling = autoscale_settings(config)
    if scaling is None:
        return None
    configured = sum(group.count for group in config.instance_group if not group.passive)
    return min(max(configured, scaling.min), scaling.max)

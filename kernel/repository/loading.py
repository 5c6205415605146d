"""Loads one version of a model: workers, the completed configuration, the scheduler, the warm-up.

At most so many versions load at the same time, and a version that fails is tried again, both as the
command line says. What fails leaves no worker behind.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

import msgspec

from kernel.config.to_json import to_json
from kernel.errors import InternalError, ServingError, Unavailable
from kernel.model import Model
from kernel.observe.log_context import about_model
from kernel.repository.backend_config import backend_config
from kernel.repository.host_policy import policy_cpus
from kernel.repository.limits import ignored_settings, refuse_unsupported
from kernel.repository.placement import plan_instances
from kernel.repository.warmup import warmup_samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.clock import Clock
    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.model import SchedulerFactory
    from kernel.repository.override import OverrideFolder
    from kernel.repository.placement import InstanceKeeper, InstancePlan
    from kernel.repository.settings import LifecycleSettings
    from kernel.repository.source import ModelSource, Prepared
    from kernel.repository.warmup import WarmupSample
    from kernel.request import Request
    from kernel.response import Response

logger = logging.getLogger(__name__)


class LoadedVersion(msgspec.Struct):
    """A version with what keeps it running."""

    model: Model
    keepers: list[InstanceKeeper]
    #: The folder of the server's own that the model was loaded from, if it was; workers read from it again
    #: when they are restarted.
    files: OverrideFolder | None = None

    def use(self, files: OverrideFolder | None) -> None:
        """Keep `files` until the workers have ended."""
        self.files = files
        if files is not None:
            files.retain()

    async def stop(self, *, at_once: bool = False) -> None:
        """End the workers, `at_once` without finalizing the model."""
        await asyncio.gather(*(keeper.stop(at_once=at_once) for keeper in self.keepers))
        if self.files is not None:
            await asyncio.to_thread(self.files.release)


class VersionLoader:
    """Loads versions of models; holds what all loads share."""

    def __init__(
        self,
        clock: Clock,
        schedule: SchedulerFactory,
        new_keeper: Callable[[], InstanceKeeper],
        settings: LifecycleSettings,
    ) -> None:
        self._clock = clock
        self._schedule = schedule
        self._new_keeper = new_keeper
        self._settings = settings
        self._gate = asyncio.Semaphore(settings.load_thread_count)

    async def load(self, source: ModelSource, config: ModelConfig, version: int) -> LoadedVersion:
        """Return a loaded version that takes requests. Raises `ServingError`; no worker is left then."""
        async with self._gate:
            with about_model(source.name, version):
                return await self._try_to_load(source, config, version)

    async def _try_to_load(self, source: ModelSource, config: ModelConfig, version: int) -> LoadedVersion:
        for attempt in range(self._settings.load_retry_count):
            try:
                return await self._load(source, config, version)
            except ServingError as error:
                logger.error(
                    "failed to load '%s' version %d, attempt %d: %s",
                    source.name, version, attempt + 1, error.message.strip(),
                )  # fmt: skip
        return await self._load(source, config, version)

    async def _load(self, source: ModelSource, config: ModelConfig, version: int) -> LoadedVersion:
        started_ns = self._clock.now_ns()
        refuse_unsupported(config)
        keepers = [self._new_keeper()]
        try:
            prepared = await self._prepare(source, config, version, keepers[0])
            plans = await asyncio.to_thread(self._plan, prepared.config, source, version)
            keepers += [self._new_keeper() for _ in plans[1:]]
            await _load_instances(keepers, plans, prepared.json)
            model = Model(prepared.spec, prepared.config, version, self._schedule, self._clock)
            for line in model.statistics.measure(self._settings.metrics, prepared.config):
                logger.warning("model '%s': %s", source.name, line)
            model.start()
            for keeper, plan in zip(keepers, plans, strict=True):
                if not plan.passive:
                    keeper.join(model)
            await self._warm_up(model, source)
        except BaseException:
            await asyncio.gather(*(keeper.stop() for keeper in keepers))
            raise
        for phrase in ignored_settings(prepared.config):
            logger.warning("model '%s': %s has no effect in this version", source.name, phrase)
        model.statistics.load_ns = self._clock.now_ns() - started_ns
        logger.info("successfully loaded '%s' version %d", source.name, version)
        return LoadedVersion(model, keepers)

    async def _prepare(
        self, source: ModelSource, config: ModelConfig, version: int, keeper: InstanceKeeper
    ) -> Prepared:
        """Start the first worker, and return the configuration as it completes it."""
        await keeper.start(source.name)
        if self._settings.auto_complete:
            settings = backend_config(self._settings.backend_configs, config.backend)
            completed = await keeper.complete(to_json(config), str(source.path), version, settings)
            config = source.complete(config, completed)
        prepared = await asyncio.to_thread(source.prepare, config)
        refuse_unsupported(prepared.config)
        return prepared

    def _plan(self, config: ModelConfig, source: ModelSource, version: int) -> list[InstancePlan]:
        """Return the instances to start, with what the command line says of them. Blocks."""
        settings = backend_config(self._settings.backend_configs, config.backend)
        policies = self._settings.host_policies
        return [
            msgspec.structs.replace(plan, backend_config=settings, cpus=policy_cpus(policies.get(plan.host_policy, {})))
            for plan in plan_instances(config, str(source.path), version)
        ]

    # ---- warm-up -----------------------------------------------------------------------------

    async def _warm_up(self, model: Model, source: ModelSource) -> None:
        """Have every instance execute the samples. Raises `ServingError`; the model has ended then."""
        if not model.config.model_warmup or not model.instances.count:
            return
        limit_s = self._settings.load_timeout_s
        try:
            files = await asyncio.to_thread(source.read_warmup_files, model.config)
            samples = warmup_samples(model.config, model.spec, files, random.Random())
            async with asyncio.timeout(limit_s or None):
                for sample in samples:
                    for _ in range(sample.count):
                        await self._run(model, sample)
        except TimeoutError:
            model.close(Unavailable("the warm-up took too long"))
            raise InternalError(f"the model's warm-up took longer than {limit_s:g} s") from None
        except BaseException:
            model.close(Unavailable("the warm-up failed"))
            raise

    async def _run(self, model: Model, sample: WarmupSample) -> None:
        """Have every instance execute `sample` once, all at the same time. Raises `ServingError`."""
        answers = _Answers()
        batches = [answers.requests(model, sample, self._clock.now_ns()) for _ in range(model.instances.count)]
        for requests in batches:
            # They go around the scheduler: it might join them, or give them all to one instance. All
            # instances are idle, and `dispatch` takes the one with the least to do: each gets one batch.
            model.statistics.pending += len(requests)
            model.instances.dispatch(requests)
        await answers.all_final()
        if answers.errors:
            raise sample.failed(answers.errors)


class _Answers:
    """Collects the responses of warm-up requests; only their errors matter."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._open = 0
        self._done = asyncio.get_running_loop().create_future()

    def requests(self, model: Model, sample: WarmupSample, now_ns: int) -> list[Request]:
        """Return the requests of one batch, whose responses come here."""
        made = []
        for _ in range(sample.batch_size):
            sink = _WarmupSink(self)
            sink.request = sample.request(model.name, sink)
            sink.request.received_ns = sink.request.queue_start_ns = now_ns
            made.append(sink.request)
        self._open += len(made)
        return made

    def received(self, response: Response) -> None:
        if response.error is not None:
            self.errors.append(response.error.message)
        if response.final:
            self._open -= 1
            if not self._open:
                self._done.set_result(None)

    async def all_final(self) -> None:
        await self._done


class _WarmupSink:
    """Takes every response at once, so that a decoupled model is never held up."""

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self.request: Request | None = None

    def send(self, response: Response) -> None:
        response.release()
        if self.request is not None:
            self.request.consumed()
        self._answers.received(response)


async def _load_instances(keepers: list[InstanceKeeper], plans: list[InstancePlan], config: str) -> None:
    """Load all instances at the same time; the first error is raised when all have ended."""
    results = await asyncio.gather(
        *(keeper.load(plan, config) for keeper, plan in zip(keepers, plans, strict=True)),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result

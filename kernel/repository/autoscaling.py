"""Changes the number of instances of a serving version with its load.

`Autoscaler` decides, from samples of the load: more instances are started when requests wait and no instance is idle in
all samples of some time. Instances are ended when one was idle in all samples of a longer time. The two conditions
exclude each other, and each change begins both times anew, so that the number does not go up and down with every change
of the load. `Autoscaling` takes the samples and applies the decisions.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from kernel.machine import available_memory_byte_size, memory_byte_size
from kernel.observe.log_lines import about_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.config.model_parameters import AutoscaleSettings
    from kernel.loop.clock import Clock
    from kernel.repository.loading import InstanceUpdate, LoadedVersion
    from kernel.repository.source import ModelSource

#: Samples in the time after which an instance is added.
_SAMPLES = 10

_SHORTEST_INTERVAL_NS = 10 * 10**6

_LONGEST_INTERVAL_NS = 500 * 10**6

#: After a failed start of instances the next one waits for this time, twice as long after each further failure.
FIRST_PAUSE_NS = 10 * 10**9

LONGEST_PAUSE_NS = 300 * 10**9


class LoadSample(msgspec.Struct, frozen=True):
    """The load of a model at one time."""

    now_ns: int
    #: Requests that no instance executes yet.
    waiting: int
    #: Instances in service, those of them that could execute one more batch, and those without any batch.
    instances: int
    free: int
    idle: int


class Autoscaler:
    """Decides for one model version."""

    def __init__(self, settings: AutoscaleSettings, count: int) -> None:
        """`count` is the number of instances that the version has."""
        self._settings = settings
        self.count = count
        #: Since when requests waited and no instance was free, in each sample; None if not in the last one.
        self._standing_since_ns: int | None = None
        #: Since when there was an idle instance in each sample, and the fewest idle ones.
        self._spare_since_ns: int | None = None
        self._least_idle = 0
        #: How many instances are added next.
        self._step = 1
        self._pause_ns = FIRST_PAUSE_NS
        self._paused_until_ns = 0

    @property
    def interval_ns(self) -> int:
        """The time between two samples."""
        shortest_ns = min(self._settings.up_after_ns, self._settings.down_after_ns) // _SAMPLES
        return min(max(shortest_ns, _SHORTEST_INTERVAL_NS), _LONGEST_INTERVAL_NS)

    def look(self, sample: LoadSample) -> int:
        """Return how many instances the version should have. If it is another number, `changed` or `failed` follows."""
        settings, now_ns = self._settings, sample.now_ns
        if not settings.min <= self.count <= settings.max:  # the version was changed by others
            return min(max(self.count, settings.min), settings.max)
        if sample.instances < self.count:  # a lost instance comes back by itself
            self._standing_since_ns = self._spare_since_ns = None
            return self.count
        self._note(sample)
        if self._standing_since_ns is not None and now_ns - self._standing_since_ns >= settings.up_after_ns:
            if self.count < settings.max and now_ns >= self._paused_until_ns:
                return min(self.count + self._step, settings.max)
        elif self._spare_since_ns is not None and now_ns - self._spare_since_ns >= settings.down_after_ns:
            # Half of those that were never needed: a wrong guess costs less than it would with all of them.
            return max(self.count - max(1, self._least_idle // 2), settings.min)
        return self.count

    def _note(self, sample: LoadSample) -> None:
        if sample.waiting and not sample.free:
            if self._standing_since_ns is None:
                self._standing_since_ns = sample.now_ns
        else:
            self._standing_since_ns = None
            self._step = 1
        if not sample.idle:
            self._spare_since_ns = None
        elif self._spare_since_ns is None:
            self._spare_since_ns, self._least_idle = sample.now_ns, sample.idle
        else:
            self._least_idle = min(self._least_idle, sample.idle)

    def changed(self, count: int) -> None:
        """The version has `count` instances now: both times begin anew."""
        # A queue that stands although there are more instances grows fast: twice as many are added then.
        self._step = 2 * self._step if count > self.count else 1
        self.count = count
        self._standing_since_ns = self._spare_since_ns = None
        self._pause_ns = FIRST_PAUSE_NS

    def failed(self, now_ns: int) -> None:
        """The instances that were to be added could not be started."""
        self._paused_until_ns = now_ns + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
        self._standing_since_ns = self._spare_since_ns = None


logger = logging.getLogger(__name__)

#: This part of the memory stays free: no instance is started that would use it.
_RESERVE = 20

#: Seconds after which it begins again, if it has failed unexpectedly.
RESTART_PAUSE_S = 10.0


class ServingVersion(msgspec.Struct, frozen=True):
    """A version whose number of instances can be changed while it serves."""

    version: LoadedVersion
    source: ModelSource
    #: Keeps loads and unloads of the model away.
    lock: asyncio.Lock
    #: Whether requests still reach the version.
    serves: Callable[[], bool]


class Autoscaling:
    """Scales one version until it is unloaded or replaced."""

    def __init__(
        self,
        serving: ServingVersion,
        settings: AutoscaleSettings,
        scale: Callable[[LoadedVersion, ModelSource, int], Awaitable[InstanceUpdate]],
        commit: Callable[[InstanceUpdate], object],
        clock: Clock,
        available: Callable[[], int] = available_memory_byte_size,
    ) -> None:
        """`scale` prepares a change, see `VersionLoader.scale`; `commit` applies it.

        `available` returns the bytes of memory that processes can still get.
        """
        self._serving = serving
        self._version = version = serving.version
        self._model = version.model
        self._settings = settings
        self._prepare = scale
        self._commit = commit
        self._clock = clock
        self._available = available
        self._decider = Autoscaler(settings, version.serving_count)
        #: What the instances that were started last have taken from the free memory, each.
        self._instance_byte_size = 0
        self._lacked_memory = False
        self._model.statistics.autoscale_instances = version.serving_count

    async def run(self) -> None:
        """Look at the load again and again. Ends when the version serves no longer."""
        while self._serving.serves():
            await self.look()
            await asyncio.sleep(self._decider.interval_ns / 1e9)

    async def look(self) -> None:
        """Take one sample, and change the number of instances if it is time."""
        decider, count = self._decider, self._version.serving_count
        if count != decider.count:  # a load request has changed it
            self._note(count)
        wanted = decider.look(self._sample())
        if wanted == count or (wanted > count and not await self._has_memory(wanted - count)):
            return
        free = self._available() if wanted > count else 0
        with about_model(self._model.name, self._model.version):
            try:
                if not await self._scale(wanted):
                    return
            except ServingError as error:
                logger.error(
                    "model '%s' version %d stays at %d instances, %d could not be started: %s",
                    self._model.name, self._model.version, count, wanted - count, error.message.strip(),
                )  # fmt: skip
                decider.failed(self._clock.now_ns())
                return
        if wanted > count:
            self._instance_byte_size = max(0, free - self._available()) // (wanted - count)
        self._log(count, wanted)
        self._note(wanted)

    async def _scale(self, count: int) -> bool:
        """Have `count` instances. Returns False if the version serves no longer. Raises `ServingError`."""
        serving = self._serving
        async with serving.lock:
            if not serving.serves():
                return False
            self._commit(await self._prepare(serving.version, serving.source, count))
            return True

    def _sample(self) -> LoadSample:
        model = self._model
        instances = model.instances
        free, idle = instances.spare_counts()
        return LoadSample(self._clock.now_ns(), model.live.queued + instances.waiting, instances.count, free, idle)

    async def _has_memory(self, more: int) -> bool:
        """Whether `more` instances leave enough memory free."""
        needed = memory_byte_size() // _RESERVE + more * self._instance_byte_size
        available = await asyncio.to_thread(self._available)
        if available >= needed:
            self._lacked_memory = False
            return True
        if not self._lacked_memory:
            self._lacked_memory = True
            logger.warning(
                "model '%s' version %d gets no more instances: %d MiB of memory are free, but %d MiB are needed",
                self._model.name, self._model.version, available >> 20, needed >> 20,
            )  # fmt: skip
        self._decider.failed(self._clock.now_ns())
        return False

    def _log(self, before: int, now: int) -> None:
        settings = self._settings
        if now > before:
            reason, time_ns = "requests have waited and no instance was idle for", settings.up_after_ns
        else:
            reason, time_ns = "there was always an idle instance for", settings.down_after_ns
        logger.info(
            "model '%s' version %d has %d instances instead of %d: %s %g s",
            self._model.name, self._model.version, now, before, reason, time_ns / 1e9,
        )  # fmt: skip

    def _note(self, count: int) -> None:
        """The version has `count` instances now."""
        statistics, before = self._model.statistics, self._decider.count
        statistics.autoscaled_up += max(0, count - before)
        statistics.autoscaled_down += max(0, before - count)
        statistics.autoscale_instances = count
        self._decider.changed(count)

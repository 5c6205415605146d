"""How many instances a model should have, from samples of its load. Pure.

More instances are started when requests wait and no instance is idle in all samples of some time. Instances are ended
when one was idle in all samples of a longer time. The two conditions exclude each other, and each change begins both
times anew, so that the number does not go up and down with every change of the load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.config.autoscale import AutoscaleSettings

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

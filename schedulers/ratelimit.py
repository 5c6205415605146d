"""The rate limiter: which instances of all models may execute, by resources and priorities. Pure.

The rules are Triton's (core's rate_limiter.cc). An instance takes its resources when it starts a batch and gives them
back when it has executed it. Where instances wait, the one with the smallest product of executions and priority is
first. An instance that waits for a resource keeps later ones from taking it; otherwise instances that need little could
always overtake one that needs much.

Two things differ from Triton, where the first instance that waits stops all others: an instance waits only for
instances that need the same resource. And an instance that is new begins with the smallest product of the others, not
with 0, so that it does not run alone until it has caught up with servers that are up for weeks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument
from kernel.limiting.limiter import GLOBAL, Resource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kernel.limiting.limiter import InstanceNeeds, LimitedInstance

#: The device of a limit that each device has for itself.
PER_DEVICE = -2


class RateLimiter:
    """Implements `kernel.limiting.limiter.Limiter`."""

    def __init__(self, limits: Mapping[Resource, int] | None = None) -> None:
        """`limits` are those of the command line, with the device `PER_DEVICE` where none was named.

        Without them, each resource has as many as the instance needs that needs most.
        """
        self._given = dict(limits or {})
        self._needs: dict[object, tuple[InstanceNeeds, ...]] = {}
        self._limits: dict[Resource, int] = {}
        self._used: dict[Resource, int] = {}
        #: Instances that wait, in the order in which they asked; whether they have asked again since they were woken.
        self._waiting: dict[LimitedInstance, bool] = {}
        #: Products at which instances have begun; the smallest at that time, so that new ones do not overtake for long.
        self._begun_at: dict[LimitedInstance, int] = {}
        self._waking = False

    # ---- models that come and go -----------------------------------------------------------------

    def register(self, owner: object, needs: Sequence[InstanceNeeds]) -> None:
        all_needs = {**self._needs, owner: tuple(needs)}
        limits = self._checked_limits(all_needs.values())
        self._needs, self._limits = all_needs, limits
        self.wake_waiting()

    def unregister(self, owner: object) -> None:
        if self._needs.pop(owner, None) is not None:
            self._limits = self._checked_limits(self._needs.values())

    def _checked_limits(self, registered: Iterable[tuple[InstanceNeeds, ...]]) -> dict[Resource, int]:
        """Return how much there is of each resource. Raises `InvalidArgument` with Triton's texts."""
        most: dict[Resource, int] = {}
        for needs in registered:
            for each in needs:
                for resource, count in each.counts.items():
                    most[resource] = max(count, most.get(resource, 0))
        for resource in most:
            if resource.device != GLOBAL and Resource(resource.name) in most:
                raise InvalidArgument(
                    f'Resource "{resource.name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
        if not self._given:
            return most
        limits: dict[Resource, int] = {}
        for resource, needed in most.items():
            limit = limits[resource] = self._given_limit(resource)
            if limit < needed:
                raise InvalidArgument(
                    f'Resource count for "{resource.name}" is limited to {limit} which will prevent scheduling of one '
                    f"or more model instances, the minimum required count is {needed}"
                )
        return limits

    def _given_limit(self, resource: Resource) -> int:
        """Return the limit of the command line. A resource that it does not name is not there at all (Triton)."""
        return max(
            (
                count
                for given, count in self._given.items()
                if given.name == resource.name
                and (resource.device == GLOBAL or given.device in (resource.device, PER_DEVICE))
            ),
            default=0,
        )

    # ---- executions ------------------------------------------------------------------------------

    def may_start(self, instance: LimitedInstance) -> bool:
        self._begin(instance)
        kept: dict[Resource, int] = {}  # for instances that are before this one
        rank = self._rank(instance)
        asked_before = True
        for other in self._waiting:  # in the order in which they asked
            if other is instance:
                asked_before = False
            elif self._rank(other) < rank + asked_before and other.wants_to_run():
                _add(kept, other.needs)
        if self._fits(instance.needs, kept):
            self._waiting.pop(instance, None)
            return True
        self._waiting[instance] = True
        return False

    def started(self, instance: LimitedInstance) -> None:
        self._waiting.pop(instance, None)
        _add(self._used, instance.needs)

    def ended(self, instance: LimitedInstance, count: int = 1) -> None:
        instance.executions += count
        _add(self._used, instance.needs, -count)

    def wake_waiting(self) -> None:
        """See `Limiter`. An instance that waits and has no request any more waits no longer."""
        if self._waking:  # an instance that was woken has ended at once
            return
        self._waking = True
        kept: dict[Resource, int] = {}  # for instances that lack something
        try:
            for instance in sorted(self._waiting, key=self._rank):
                if instance not in self._waiting:
                    continue
                if not instance.wants_to_run():
                    del self._waiting[instance]
                elif self._fits(instance.needs, kept):
                    self._waiting[instance] = False
                    instance.wake()  # it has its place in the order while it asks
                    if not self._waiting.get(instance, True):
                        del self._waiting[instance]
                else:
                    _add(kept, instance.needs)
        finally:
            self._waking = False

    def forget(self, instance: LimitedInstance) -> None:
        self._waiting.pop(instance, None)
        self._begun_at.pop(instance, None)

    def _begin(self, instance: LimitedInstance) -> None:
        """Note an instance that asks for the first time."""
        if instance not in self._begun_at:
            ranks = [self._rank(other) for other in self._begun_at]
            own = instance.executions * instance.needs.priority
            self._begun_at[instance] = max(0, min(ranks, default=0) - own)

    def _rank(self, instance: LimitedInstance) -> int:
        """Return Triton's product of executions and priority; the smallest is first."""
        return self._begun_at[instance] + instance.executions * instance.needs.priority

    def _fits(self, needs: InstanceNeeds, kept: dict[Resource, int]) -> bool:
        """Whether there is enough of each resource beside what is used and kept."""
        return all(
            self._used.get(resource, 0) + kept.get(resource, 0) + count <= self._limits.get(resource, 0)
            for resource, count in needs.counts.items()
        )

    def check(self) -> None:
        """Check that no more is used than there is; for tests."""
        for resource, used in self._used.items():
            assert 0 <= used <= self._limits.get(resource, used), f"{used} of {resource} are in use"


def parse_limits(values: Iterable[str]) -> dict[Resource, int]:
    """Read the values of --rate-limit-resource, whose form was checked. Of equal ones the smallest counts (Triton)."""
    limits: dict[Resource, int] = {}
    for value in values:
        name, count, *device = value.split(":")
        resource = Resource(name, int(device[0]) if device else PER_DEVICE)
        limits[resource] = min(int(count), limits.get(resource, int(count)))
    return limits


def _add(counts: dict[Resource, int], needs: InstanceNeeds, times: int = 1) -> None:
    for resource, count in needs.counts.items():
        counts[resource] = counts.get(resource, 0) + times * count

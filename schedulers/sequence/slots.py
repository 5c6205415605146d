"""The slots of a model's instances: each holds one sequence. Pure."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.instance import Instance


class _InstanceSlots:
    """The free slots of one instance."""

    __slots__ = ("freed", "unused")

    def __init__(self) -> None:
        #: The lowest slot that was never used. A model may have many slots, and most are never used.
        self.unused = 0
        #: Heap of the other free slots.
        self.freed: list[int] = []

    def lowest(self) -> int:
        return self.freed[0] if self.freed else self.unused


class SlotTable:
    """Chooses a slot for a new sequence: the lowest one that is free in any instance (Triton).

    So sequences are spread over the instances, and batches of the strategy `direct` stay short.
    """

    def __init__(self, slot_count: int) -> None:
        """Each instance has `slot_count` slots."""
        self._slot_count = slot_count
        self._instances: dict[Instance, _InstanceSlots] = {}

    def take(self, instances: Iterable[Instance]) -> tuple[Instance, int] | None:
        """Take a free slot of one of `instances`, or return None if they have none."""
        best: Instance | None = None
        lowest = self._slot_count
        for instance in instances:
            slots = self._instances.get(instance)
            slot = 0 if slots is None else slots.lowest()
            if slot < lowest:
                best, lowest = instance, slot
        if best is None:
            return None
        slots = self._instances.setdefault(best, _InstanceSlots())
        if slots.freed:
            heapq.heappop(slots.freed)
        else:
            slots.unused += 1
        return best, lowest

    def free(self, instance: Instance, slot: int) -> None:
        """Give a slot back. Does nothing for an instance that is gone."""
        slots = self._instances.get(instance)
        if slots is not None:
            heapq.heappush(slots.freed, slot)

    def remove(self, instance: Instance) -> None:
        """The instance is gone, and its slots with it."""
        self._instances.pop(instance, None)

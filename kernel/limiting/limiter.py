"""What a rate limiter is for the instances of models: `schedulers/ratelimit.py` implements it.

The limiter decides across all models which instances may execute. An instance needs resources, which are numbers with
names: an operator limits with them which models run at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The device of a resource that all devices share.
GLOBAL = -1


class Resource(msgspec.Struct, frozen=True):
    """A resource of one device, or of all devices together (`GLOBAL`)."""

    name: str
    device: int = GLOBAL


class InstanceNeeds(msgspec.Struct, frozen=True):
    """What an instance needs for each execution, and its weight."""

    counts: dict[Resource, int] = {}
    #: 2 executes half as often as 1 while both wait; at least 1.
    priority: int = 1


class LimitedInstance(Protocol):
    """An instance of which the limiter decides when it executes. Implemented by `kernel.limiting.instance_gate`."""

    needs: InstanceNeeds
    #: How many batches it has executed. The limiter counts.
    executions: int

    def wants_to_run(self) -> bool:
        """Whether a request is queued that the instance could take now."""

    def wake(self) -> None:
        """The instance may start now: let the scheduler ask again."""


class Limiter(Protocol):
    """Gives resources to instances."""

    def register(self, owner: object, needs: Sequence[InstanceNeeds]) -> None:
        """Note what the instances of `owner` need; replaces what it needed before.

        Raises `InvalidArgument` if one of them could never execute; then nothing has changed.
        """

    def unregister(self, owner: object) -> None:
        """The instances of `owner` are gone. A second call does nothing."""

    def may_start(self, instance: LimitedInstance) -> bool:
        """Whether `instance` may start an execution now. If not, it waits, and is woken when it may.

        Takes nothing: `started` does, and must follow before another instance is asked about.
        """

    def started(self, instance: LimitedInstance) -> None:
        """`instance` has begun an execution."""

    def ended(self, instance: LimitedInstance, count: int = 1) -> None:
        """`count` executions of `instance` have ended. Call `wake_waiting` when the instance may be asked about."""

    def wake_waiting(self) -> None:
        """Wake the instances that wait and may start now."""

    def forget(self, instance: LimitedInstance) -> None:
        """`instance` takes no more batches for now: it does not wait."""

"""The events that a scheduler gets. Each model version has one inbox, which delivers its events in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from kernel.serving.instances import Instance
    from kernel.serving.request import Request


class Submitted(msgspec.Struct, frozen=True):
    """A checked request wants to run. The scheduler owns it until it dispatches or fails it."""

    request: Request


class Cancelled(msgspec.Struct, frozen=True):
    """The client of a request that no instance has is gone; the scheduler may not have it any more."""

    request: Request


class InstanceIdle(msgspec.Struct, frozen=True):
    """`instance` can take a batch, and requests wait: it has finished one, or was just added.

    Not posted while no request waits: a scheduler asks `InstanceSet` when a request comes.
    """

    instance: Instance


class InstanceLost(msgspec.Struct, frozen=True):
    """`instance` is gone. It had not started `returned`: they are the scheduler's again, before all other requests."""

    instance: Instance
    returned: list[Request]


class DeadlineReached(msgspec.Struct, frozen=True):
    """The time that the scheduler waited for has come."""


class NoInstanceLeft(msgspec.Struct, frozen=True):
    """No instance is alive and the last attempt to restart one failed: queued requests fail with `error`."""

    error: ServingError


Event = Submitted | Cancelled | InstanceIdle | InstanceLost | DeadlineReached | NoInstanceLeft

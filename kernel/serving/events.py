"""What a scheduler can be told. One inbox per model version; every event is delivered in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from kernel.serving.request import Request


class Submitted(msgspec.Struct, frozen=True):
    """A checked request wants to run. The scheduler owns it until it dispatches or fails it."""

    request: Request


class Cancelled(msgspec.Struct, frozen=True):
    """The client of a request that is not executing has gone; the scheduler may not have it any more."""

    request: Request


class Returned(msgspec.Struct, frozen=True):
    """An instance was lost before it started these requests: they are the scheduler's again, and first."""

    requests: list[Request]


class InstanceIdle(msgspec.Struct, frozen=True):
    """An instance can take a batch, and requests wait: it has finished one, or it has just been (re)started.

    Not told while nothing waits: a scheduler asks `instances` when a request comes.
    """


class DeadlineReached(msgspec.Struct, frozen=True):
    """The time that the scheduler waited for has come."""


class NoInstanceLeft(msgspec.Struct, frozen=True):
    """No instance is alive and the last attempt to restart one failed: queued requests fail with `error`."""

    error: ServingError


Event = Submitted | Cancelled | Returned | InstanceIdle | DeadlineReached | NoInstanceLeft

"""The events that a scheduler gets. Each model version has one inbox, which delivers its events in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.errors import ServingError
    from kernel.serving.instance import Instance
    from kernel.serving.request import Request
    from kernel.serving.response import Response


class Submitted(msgspec.Struct, frozen=True):
    """A request was checked and is queued. The scheduler owns it until it dispatches or fails it."""

    request: Request


class Cancelled(msgspec.Struct, frozen=True):
    """The client of a queued request has disconnected. The scheduler may have ended the request already."""

    request: Request


class RequestRescheduled(msgspec.Struct, frozen=True):
    """The model has given a request back, to execute it again (iterative sequences). The scheduler owns it again."""

    request: Request


class Consumed(msgspec.Struct, frozen=True):
    """The client took `count` responses of a request that no instance has: an ensemble's."""

    request: Request
    count: int


class ChildResponded(msgspec.Struct, frozen=True):
    """`child`, a request that the scheduler has submitted itself, got `response`, which the scheduler owns."""

    child: Request
    response: Response


class InstanceIdle(msgspec.Struct, frozen=True):
    """`instance` can take a batch, and requests are queued. It has finished a batch, or was just added.

    Not posted while no request is queued: on `Submitted`, a scheduler asks `InstanceSet` for an instance.
    """

    instance: Instance


class InstanceLost(msgspec.Struct, frozen=True):
    """`instance` is gone. It had not started `returned`: the scheduler owns them again, before all other requests."""

    instance: Instance
    returned: list[Request]


class BatchesRecalled(InstanceLost, frozen=True):
    """`instance` gives back what it had not started: its model waits for another model. The instance is not gone.

    Schedulers do the same as for a lost instance: `returned` comes before all other requests.
    """


class DeadlineReached(msgspec.Struct, frozen=True):
    """The scheduler's deadline (`Inbox.next(until_ns)`) has passed."""


#: How many queued requests a scheduler fails in one piece after `NoInstanceLeft`.
FAILED_AT_ONCE = 64


class NoInstanceLeft(msgspec.Struct, frozen=True):
    """No instance is alive and the last attempt to restart one failed: queued requests fail with `error`.

    A hundred thousand can be queued, and to fail one takes 3 µs or more. So `FAILED_AT_ONCE` fail now, and as many in
    each further iteration of the event loop. If an instance becomes idle meanwhile, it executes those that are left.
    """

    error: ServingError


Event = (
    Submitted
    | Cancelled
    | RequestRescheduled
    | Consumed
    | ChildResponded
    | InstanceIdle
    | InstanceLost
    | BatchesRecalled
    | DeadlineReached
    | NoInstanceLeft
)

"""Requests that a lost worker was executing: of a large batch some fail in each event-loop iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backends.supervision.watch.batch_stages import Stage
from kernel.errors import RequestCancelled, ServingError, WorkerLost

if TYPE_CHECKING:
    from kernel.serving.request import Request


class Loss(msgspec.Struct, frozen=True):
    """How a worker was lost."""

    instance_name: str
    cause: str
    #: The error of its requests, if it is not that the worker was lost.
    error: ServingError | None


class LostRequest(msgspec.Struct, frozen=True):
    """A request that a lost worker had. Implements `kernel.loop.cancellations.Cancellable`."""

    request: Request
    loss: Loss
    #: How far the worker was with the request.
    stage: Stage

    def cancel(self) -> None:
        """Fail the request, and give its leases back: no worker uses them."""
        request, loss = self.request, self.loss
        request.in_use = False
        if request.finished:  # the server abandoned it at its exit
            request.release_leases()
        elif request.cancelled and self.stage is Stage.UNTOUCHED:
            request.fail(RequestCancelled())
        else:
            request.fail(loss.error or WorkerLost(loss.instance_name, loss.cause, self.stage.value))

"""The credit of the streams of one worker: how many responses it may send before their clients have taken others. Pure.

A worker may have `wire.CREDIT_WINDOW` responses of a request under way. For those that the client takes it gets
credit, in portions: a stream does not need a message for each response.

Makes the response of a request from what its worker has sent, which is not trusted.

Requests that a lost worker was executing: of a large batch some fail in each event-loop iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backends.supervision.batch_stages import Stage
from backends.transport import wire
from backends.transport.texts import MAX_TEXT_BYTES
from kernel.errors import ErrorCode, RequestCancelled, ServingError, WorkerLost, worker_error
from kernel.serving.response import Response

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from backends.supervision.remote_memory import RemoteMemory
    from backends.supervision.worker_memory import WorkerMemory
    from kernel.serving.request import Request

#: How many responses a portion of credit allows.
_PORTION = wire.CREDIT_WINDOW // 4


class StreamCredit:
    """The credit of all requests of one worker, by their numbers in messages."""

    def __init__(self, send: Callable[[wire.ToWorker], None]) -> None:
        self._send = send
        #: Responses that clients took without credit sent.
        self.unsent: dict[int, int] = {}
        #: Responses for which credit was sent.
        self.granted: dict[int, int] = {}

    def consumed(self, number: int, count: int) -> None:
        """The client took `count` responses of an unfinished request."""
        credit = self.unsent.get(number, 0) + count
        if credit >= _PORTION:
            self._send(wire.Credit(number, credit))
            self.granted[number] = self.granted.get(number, 0) + credit
            credit = 0
        self.unsent[number] = credit

    def forget(self, number: int) -> None:
        """The request has its final response, or is not executed any more."""
        self.unsent.pop(number, None)
        self.granted.pop(number, None)

    def blocked(self, requests: Mapping[int, Request]) -> dict[Request, Hashable]:
        """Return those of `requests`, all of the worker, for which it may send no response before others are taken, and
        marks that change with each that is. Without those of ensembles, whose later steps may take long."""
        granted, unsent = self.granted, self.unsent
        return {
            request: (request.response_count, granted.get(number, 0), unsent.get(number, 0))
            for number, request in requests.items()
            if request.response_count - granted.get(number, 0) >= wire.CREDIT_WINDOW
            and not (request.finished or request.cancelled)
            and (request.parent is None or request.parent.composed is None)
        }


def worker_response(
    request: Request,
    message: wire.ResponseMessage | None,
    version: str,
    memory: WorkerMemory | RemoteMemory,
    *,
    final: bool,
) -> Response:
    """Return the response, which owns the leases of its outputs in `memory`.

    Without a `message` it only marks the end. `version` is the model's. Raises ValueError, and keeps no lease,
    for a message that breaks the protocol.
    """
    if message is None:
        return Response(request.model_name, version, request.id, final=final)
    if message.error_code:
        if len(message.error_text) > MAX_TEXT_BYTES:
            raise ValueError(f"an error text of {len(message.error_text)} characters")
        error = worker_error(ErrorCode(message.error_code), message.error_text)
        error.before_queueing = message.error_before_queueing
        return Response(request.model_name, version, request.id, error=error, final=final)
    leased = False
    try:
        for tensor in message.outputs:
            if tensor.span is not None:
                memory.take_output(request, tensor, tensor.span, final=final)
                leased = leased or tensor.span is not None
            elif tensor.data is None:
                raise ValueError(f"output '{tensor.name}' has no bytes")
    except ValueError:
        for tensor in message.outputs:
            tensor.release()
        raise
    return Response(request.model_name, version, request.id, message.outputs, message.parameters, None, final, leased)


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

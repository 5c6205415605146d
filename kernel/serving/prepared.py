"""A request without its id and its bytes, which was checked for a model once. Pure.

A front door recognises that a message has the same form as an earlier one. Then nothing has to be parsed and checked
again, as long as the catalog of models stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shm.arena import INLINE_LIMIT
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Response, Sink


class _NoSink:
    """The sink of a request that is never submitted. It keeps nothing of the first request of the form alive."""

    def send(self, response: Response) -> None:
        raise AssertionError("a prepared request was submitted itself, not a copy of it")


_NO_SINK = _NoSink()


class PreparedRequest(msgspec.Struct, frozen=True):
    """What requests of one form have in common."""

    #: Never submitted; its inputs have no data and no leases.
    request: Request
    #: The model that the request was checked for.
    model: Model
    #: Whether anything is in shared memory, so that requested outputs get leases and are not shared by requests.
    leases: bool
    #: Whether all inputs travel in a message, and nothing is in shared memory.
    small: bool

    def with_inputs(self, inputs: list[Tensor], id: str, sink: Sink) -> Request:
        """Return a request of this form, to be submitted together with this object."""
        request: Request = self.request.__copy__()  # type: ignore[attr-defined]  # `copy` without its frame
        request.id, request.inputs, request.sink = id, inputs, sink
        if self.leases:
            request.outputs = [RequestedOutput(o.name, o.classification, None, o.client_span) for o in request.outputs]
        if request.parameters:
            request.parameters = dict(request.parameters)
        return request


def prepare(request: Request, model: Model) -> PreparedRequest:
    """Return the form of a request that was checked for `model`, before its tensors are placed."""
    # The kernel has leased what clients named by now, so the names come from the spans.
    inputs = [Tensor(t.name, t.datatype, t.shape, None, None, t.region_of_client) for t in request.inputs]
    outputs = [RequestedOutput(o.name, o.classification, None, o.region_of_client) for o in request.outputs]
    leases = any(tensor.client_span is not None for tensor in inputs) or any(
        output.client_span is not None for output in outputs
    )
    common = request.copy()
    common.sink, common.inputs, common.outputs = _NO_SINK, inputs, outputs
    common.parameters = dict(request.parameters)
    small = not leases and all(tensor.byte_size <= INLINE_LIMIT for tensor in request.inputs)
    return PreparedRequest(common, model, leases, small)

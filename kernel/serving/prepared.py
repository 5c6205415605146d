"""A request without its id and its bytes, which was checked for a model once: what requests like it are made of. Pure.

A front door recognises that a message is like an earlier one; then nothing has to be parsed and checked again,
as long as the catalog of models stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.serving.request import InputTensor, Request, RequestedOutput
from shm.arena import INLINE_LIMIT

if TYPE_CHECKING:
    from kernel.serving.model import Model
    from kernel.serving.response import Response, Sink


class _Nobody:
    """The sink of a request that is never submitted; it keeps nothing of the first of its kind alive."""

    def send(self, response: Response) -> None:
        raise AssertionError("a form was submitted")


_NOBODY = _Nobody()


class PreparedRequest(msgspec.Struct, frozen=True):
    """What requests of one form have in common."""

    #: Never submitted; its inputs have no data.
    request: Request
    #: What the request was checked for.
    model: Model
    #: Whether anything is in shared memory, so that tensors are not shared between requests.
    leases: bool
    #: Whether all inputs travel in a message, and nothing is in shared memory.
    small: bool

    def with_inputs(self, inputs: list[InputTensor], id: str, sink: Sink) -> Request:
        """Return a request of this form, for `Kernel.lease` and `start`, or for `start_small`."""
        request: Request = self.request.__copy__()  # type: ignore[attr-defined]  # `copy` without its frame
        request.id, request.inputs, request.sink = id, inputs, sink
        if self.leases:
            request.outputs = [RequestedOutput(o.name, o.classification, o.shared_memory) for o in request.outputs]
        if request.parameters:
            request.parameters = dict(request.parameters)
        return request


def prepare(request: Request, model: Model) -> PreparedRequest:
    """Return the form of a request that was checked for `model` and not started."""
    leases = any(tensor.shared_memory is not None for tensor in request.inputs) or any(
        output.shared_memory is not None for output in request.outputs
    )
    small = not leases and all(tensor.byte_size <= INLINE_LIMIT for tensor in request.inputs)
    like = request.copy()
    like.sink = _NOBODY
    like.inputs = [InputTensor(t.name, t.datatype, t.shape, None, t.shared_memory) for t in request.inputs]
    like.parameters = dict(request.parameters)
    return PreparedRequest(like, model, leases, small)

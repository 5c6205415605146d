"""The copy of a request for a second receiver: it is submitted itself, and the client of the first never sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.serving.request import Request
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from kernel.serving.response import Sink


def second_copy(request: Request, sink: Sink) -> Request:
    """Return a request for the same inference, whose responses `sink` gets.

    Submit it at once, with the route of the version that gets it: until then its inputs are in the arena of `request`.
    They are copied, because a model may change its inputs in place. Inputs in regions of clients are shared. No output
    goes to a region of a client. The copy belongs to no sequence, trace or parent and has no timeout: `request` has.
    If it is not submitted after all, the caller calls its `release_leases`.
    """
    inputs = [
        Tensor(each.name, each.datatype, each.shape, span=each.span.shared())
        if each.span is not None and each.span.lease.region.of_client
        else Tensor(each.name, each.datatype, each.shape, each.raw())
        for each in request.inputs
    ]
    outputs = [RequestedOutput(each.name, each.classification) for each in request.outputs]
    return Request(
        request.model_name,
        inputs,
        sink,
        id=request.id,
        outputs=outputs,
        parameters=dict(request.parameters),
        streaming=request.streaming,
        entry_point=request.entry_point,
        batch_size=request.batch_size,
    )

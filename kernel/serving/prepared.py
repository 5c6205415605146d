"""Prepared requests: checked once, without id and tensor bytes, so that equal requests can be made from them. Pure.

A front door recognises a message that differs from an earlier one only in id and tensor bytes. It makes the request
from the prepared one, without parsing and checking. What was prepared is valid for one generation of the catalog
(`Catalog.generation`), and kept in a cache of limited size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from kernel.serving.request import NO_SINK, REQUEST_BYTE_SIZE
from shm.arena import INLINE_LIMIT
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from kernel.serving.request import Request
    from kernel.serving.response import Sink
    from kernel.serving.route import ModelRoute


class PreparedRequest(msgspec.Struct, frozen=True):
    """The common part of equal requests."""

    #: The request that is copied. It is never submitted; its inputs have no data and no leases.
    request: Request
    #: The route whose signature the request fits.
    route: ModelRoute
    #: Whether a tensor is in a client's region. Then each request needs requested outputs of its own, for leases.
    uses_client_regions: bool
    #: Whether all inputs are small enough for a message, and no tensor is in a client's region.
    small: bool

    def with_inputs(self, inputs: list[Tensor], id: str, sink: Sink) -> Request:
        """Return a request with these inputs. Submit it together with this object."""
        request: Request = self.request.__copy__()  # type: ignore[attr-defined]  # as `copy`, without its call
        request.id, request.inputs, request.sink = id, inputs, sink
        if self.uses_client_regions:
            request.outputs = [RequestedOutput(o.name, o.classification, None, o.client_span) for o in request.outputs]
        if request.parameters:
            request.parameters = dict(request.parameters)
        return request


def prepare(request: Request, route: ModelRoute) -> PreparedRequest:
    """Return a prepared request made from one that fits `route` and whose tensors are not placed yet."""
    # The kernel has replaced client spans by leased spans, so their names come from the spans.
    inputs = [Tensor(t.name, t.datatype, t.shape, None, None, t.region_of_client) for t in request.inputs]
    outputs = [RequestedOutput(o.name, o.classification, None, o.region_of_client) for o in request.outputs]
    uses_client_regions = any(tensor.client_span is not None for tensor in inputs) or any(
        output.client_span is not None for output in outputs
    )
    common = request.copy()
    common.sink, common.inputs, common.outputs = NO_SINK, inputs, outputs
    common.parameters = dict(request.parameters)
    common.received_ns = 0
    common.bucket = -1
    small = not uses_client_regions and all(tensor.byte_size <= INLINE_LIMIT for tensor in request.inputs)
    common.byte_size = REQUEST_BYTE_SIZE + sum(tensor.byte_size for tensor in request.inputs) if small else 0
    return PreparedRequest(common, route, uses_client_regions, small)


Key = TypeVar("Key")

Prepared = TypeVar("Prepared")


class PreparedCache(Generic[Key, Prepared]):
    """Prepared values by key, for one generation. A full cache is emptied: clients repeat few kinds of requests.

    Read it in two steps. If `generation` is not the catalog's, call `start_generation` and take this as a miss;
    else call `entries.get(key)`. A method that did both would cost every request a Python call.
    """

    __slots__ = ("_max_entries", "entries", "generation")

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        #: Read-only outside of this class; use `add`.
        self.entries: dict[Key, Prepared] = {}
        #: The generation of the catalog that `entries` are valid for.
        self.generation = -1

    def start_generation(self, generation: int) -> None:
        """Drop what was prepared for another generation."""
        self.entries.clear()
        self.generation = generation

    def add(self, key: Key, prepared: Prepared) -> None:
        """Keep `prepared`, which is valid for the current `generation`."""
        if len(self.entries) >= self._max_entries and key not in self.entries:
            self.entries.clear()
        self.entries[key] = prepared

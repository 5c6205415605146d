"""The sink of a request that the cache did not find: it stores the response, and passes it on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import QueueFull, ServingError
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.cache.access import CacheAccess
    from kernel.serving.response import Response, Sink


class StoringSink:
    """Stores a response that ends its request and is no error. Errors are never stored (Triton 2.51 stores them).

    A response whose outputs are in regions of the client is passed on after a helper has read them: from then on the
    client may change them.
    """

    __slots__ = ("_access", "_key", "_lookup_ns", "_several", "_sink")

    def __init__(self, sink: Sink, access: CacheAccess, key: bytes, lookup_ns: int) -> None:
        """`lookup_ns` is how long the lookup took, which is a part of the cost of a miss."""
        self._sink = sink
        self._access = access
        self._key = key
        self._lookup_ns = lookup_ns
        #: Whether the request had a response that did not end it.
        self._several = False

    @property
    def peer(self) -> str:
        """See `Sink`."""
        return self._sink.peer

    def send(self, response: Response) -> None:
        """See `Sink`."""
        if not response.final:
            self._several = True
        elif response.error is not None or response.outputs is None or self._several:
            if not isinstance(response.error, QueueFull):  # such a request was never accepted (Triton)
                self._count_miss(0)
        elif any(_of_client(each) for each in response.outputs):
            self._access.hold(response)
            self._access.start(self._read_and_send(response))
            return
        else:
            self._store(response, response.outputs)
        self._sink.send(response)

    def _store(self, response: Response, outputs: list[Tensor]) -> None:
        access = self._access
        begun_ns = access.clock.now_ns()
        if access.cache.insert(self._key, outputs, response.parameters):
            # As in Triton, a request that ran beside an equal one counts neither as hit nor as miss.
            self._count_miss(access.clock.now_ns() - begun_ns)

    def _count_miss(self, insertion_ns: int) -> None:
        access = self._access
        access.model.statistics.record_cache_miss(self._lookup_ns + insertion_ns, access.clock.now_ns())

    async def _read_and_send(self, response: Response) -> None:
        """Have a helper read outputs in regions of the client, store the response, and pass it on."""
        assert response.outputs is not None
        copies: list[Tensor] = []
        try:
            outputs: list[Tensor] = []
            for output in response.outputs:
                copy = output
                if _of_client(output):
                    assert output.span is not None
                    span = await self._access.regions.read(output.span)
                    copy = Tensor(output.name, output.datatype, output.shape, None, span)
                    copies.append(copy)
                outputs.append(copy)
            self._store(response, outputs)
        except ServingError:  # the client has shortened the region, for example: nothing is stored
            self._count_miss(0)
        finally:
            for copy in copies:
                copy.release()
            self._sink.send(response)
            self._access.let_go(response)


def _of_client(tensor: Tensor) -> bool:
    return tensor.span is not None and tensor.span.lease.region.of_client

"""What the response passes of a request that the cache did not find: it is stored, and passed on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.errors import QueueFull, ServingError
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.cache.access import CacheAccess
    from kernel.cache.interface import ExpectedOutputs
    from kernel.serving.response import Response, ResponseReceiver


#: Seconds for which a response may be held. If a helper is busy for longer, the response is sent without it.
HOLD_TIMEOUT_S = 1.0


class StoringPassage:
    """Stores a successful final response. Errors are never stored (Triton 2.51 stores them).

    A response whose outputs are in regions of the client is passed on after a helper has read them: from then on the
    client may change them.
    """

    __slots__ = ("_expected", "_inner", "_key", "_lookup_ns", "_salt", "_several", "access")

    def __init__(self, inner: ResponseReceiver, access: CacheAccess, key: bytes, salt: bytes, lookup_ns: int,
                 expected: ExpectedOutputs) -> None:  # fmt: skip
        """`salt` is in the key. `lookup_ns` is how long the lookup took, which is a part of the cost of a miss.

        `expected` is for the cache, see `ResponseCache`.
        """
        self._expected = expected
        self._inner = inner
        self.access = access
        self._key = key
        self._salt = salt
        self._lookup_ns = lookup_ns
        #: Whether the request had a response that did not end it.
        self._several = False

    def send(self, response: Response) -> None:
        """See `ResponseReceiver`."""
        if not response.final:
            self._several = True
        elif response.error is not None or response.outputs is None or self._several:
            if not isinstance(response.error, QueueFull):  # such a request was never accepted (Triton)
                self._count_miss(0)
        elif any(_of_client(each) for each in response.outputs):
            HeldResponse(self, response).begin()
            return
        else:
            self._store(response, response.outputs)
        self._inner.send(response)

    def _store(self, response: Response, outputs: list[Tensor]) -> None:
        access = self.access
        if access.salt() != self._salt:  # a step of the ensemble was loaded again, and may have taken part
            self._count_miss(0)
            return
        begun_ns = access.clock.now_ns()
        if access.cache.insert(self._key, outputs, response.parameters, self._expected):
            # As in Triton, a request that ran beside an equal one counts neither as hit nor as miss.
            self._count_miss(access.clock.now_ns() - begun_ns)

    def _count_miss(self, insertion_ns: int) -> None:
        access = self.access
        access.model.statistics.record_cache_miss(self._lookup_ns + insertion_ns, access.clock.now_ns())

    def held(self, response: Response, outputs: list[Tensor] | None) -> None:
        """Send a response that was held, and store `outputs`, if they could be read."""
        if outputs is None:
            self._count_miss(0)
        else:
            self._store(response, outputs)
        self._inner.send(response)


class HeldResponse:
    """A response with outputs in regions of the client, which is held until they are read."""

    def __init__(self, passage: StoringPassage, response: Response) -> None:
        self._passage = passage
        self._response = response
        self._access = passage.access
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Read the outputs, store them, and send the response; after `HOLD_TIMEOUT_S` send it nevertheless."""
        self._access.hold(self._response)
        self._timer = asyncio.get_running_loop().call_later(HOLD_TIMEOUT_S, self._end, None)
        self._access.start(self._read())

    async def _read(self) -> None:
        outputs: list[Tensor] = []
        copies: list[Tensor] = []
        complete = False
        # The response may be sent, and released, before all is read.
        places = [each.span and each.span.shared() for each in self._response.outputs or ()]
        try:
            for output, place in zip(self._response.outputs or (), places, strict=True):
                if place is None or not place.lease.region.of_client:
                    outputs.append(output)
                    continue
                span = await self._access.regions.read(place)
                copies.append(Tensor(output.name, output.datatype, output.shape, None, span))
                outputs.append(copies[-1])
            complete = True
        except ServingError:
            pass  # the client has shortened the region, for example: nothing is stored
        finally:
            self._end(outputs if complete else None)
            for place in places:
                if place is not None:
                    place.lease.release()
            for copy in copies:
                copy.release()

    def _end(self, outputs: list[Tensor] | None) -> None:
        """Send the response, unless it was sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._passage.held(self._response, outputs)
            self._access.let_go(self._response)


def _of_client(tensor: Tensor) -> bool:
    return tensor.span is not None and tensor.span.lease.region.of_client

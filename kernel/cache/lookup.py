"""One request of a model with a response cache: its key, the lookup, and the response that is stored.

`CacheAccess` gets the requests of a model version before its queue. A request with small inputs in the memory of the
server takes one call, if the cache is local. All others wait: large inputs are hashed by a helper, and inputs in
regions of clients are first copied by a helper. The model then gets the copy, because its client may change the region
at any time: the response must belong to the bytes of the key, or one client could choose the responses of others.

The response to a request that the cache did not find passes a `StoringPassage`, which has it stored.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.errors import QueueFull, RequestCancelled, ServingError
from kernel.serving.helper_tasks import MessageTask
from kernel.serving.request_key import DIGEST, describe, digest, inputs_in_order
from kernel.serving.response import Response, peer_of_sink
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from typing import Any

    from kernel.cache.interface import CachedResponse, ExpectedOutputs, ResponseCache
    from kernel.loop.clock import Clock
    from kernel.serving.helper_tasks import Helpers, RegionAccess
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import ResponseReceiver

#: Requests with more bytes of inputs are not looked up: hashing takes about 1 ms for each MiB.
MAX_INPUT_BYTE_SIZE = 64 << 20


class CacheAccess:
    """Looks requests up before the model gets them. Implements `kernel.serving.model.Entrance`."""

    def __init__(
        self,
        model: Model,
        cache: ResponseCache,
        salt: Callable[[], bytes | None],
        *,
        helpers: Helpers,
        regions: RegionAccess,
        start: Callable[[Coroutine[Any, Any, None]], object],
        clock: Clock,
    ) -> None:
        """`salt` returns what identifies the present load of the model in keys; None if no request may be looked up.

        `start` runs a coroutine in a task.
        """
        self.model = model
        self.cache = cache
        self.helpers = helpers
        self.regions = regions
        self.start = start
        self.clock = clock
        self.salt = salt
        #: The datatypes of the model's outputs, by name.
        self.datatypes = {name: output.datatype for name, output in model.spec.outputs.items()}

    def submit(self, request: Request) -> None:
        """Respond to a checked request from the cache, or queue it; own it from now on. Raises `ServingError`."""
        salt = self.salt()
        if salt is None or not _can_be_cached(request):
            self.model.submit(request)
        else:
            Lookup(self, request, salt).begin()

    def hold(self, response: Response) -> None:
        """A final response is kept back: the model version is in use until `let_go`."""
        self.model.live.at_cache.add(response)

    def let_go(self, response: Response) -> None:
        """A response that was kept back is sent, or no longer wanted."""
        self.model.left_cache(response)


def _can_be_cached(request: Request) -> bool:
    """Whether a response of the cache can be the response of this request."""
    if sum(each.byte_size for each in request.inputs) > MAX_INPUT_BYTE_SIZE:
        return False
    if request.outputs and any(each.span is not None for each in request.outputs):
        # An output that is named twice, with a region, could be either of two in the response.
        names = [each.name for each in request.outputs]
        return len(set(names)) == len(names)
    return True


#: Inputs of up to this number of bytes are hashed in the event loop, which takes about 0.1 ms.
HASHED_AT_ONCE = 64 << 10

#: Seconds in which the key of a request must be known. Then it goes to the model, and its response is not stored.
KEY_TIMEOUT_S = 5.0

#: Bytes that go to a region of a client at a time. They are copied once in the event loop, for the helper.
_WRITTEN_AT_ONCE = 1 << 20


class Lookup:
    """One request on its way through the cache. While it waits, it is the owner of the request."""

    def __init__(self, access: CacheAccess, request: Request, salt: bytes) -> None:
        self._access = access
        self._request = request
        self._salt = salt
        self._description = describe(request, salt)
        #: Whether the request waits at the cache: then it is in the record of live requests.
        self._waits = False
        #: Whether the request went to the model, or has its final response.
        self._ended = False
        self._key = b""
        #: Ends the wait for the key.
        self._timer: asyncio.TimerHandle | None = None
        self._begun_ns = access.clock.now_ns()

    def begin(self) -> None:
        """Look the request up. Raises `ServingError` if it goes to the model at once, and the model cannot take it."""
        request = self._request
        request.queue_start_ns = self._begun_ns
        if _small_and_here(request):
            self._ask(digest(self._description, [each.raw() for each in inputs_in_order(request)]))
            if not self._ended:
                self._wait()
        else:
            self._wait()
            self._timer = asyncio.get_running_loop().call_later(KEY_TIMEOUT_S, self._execute_without_key)
            self._access.start(self._find_key())

    def _ask(self, key: bytes) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._key = key
        self._access.cache.lookup(key, self._found, self._expected)

    def _expected(self) -> Mapping[str, str]:
        """Return the datatypes, by name, of the outputs that a response to this request can have."""
        datatypes, requested = self._access.datatypes, self._request.outputs
        if not requested:
            return datatypes
        return {each.name: "BYTES" if each.classification else datatypes.get(each.name, "") for each in requested}

    # ---- kernel.serving.request.RequestOwner, while the request waits ----------------------------

    def responded(self, request: Request, response: Response) -> None:
        """Note the error of a request that was cancelled or abandoned. What the cache finds is not used then."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if response.error is not None:
            self._access.model.statistics.record_failure(request, response.error, self._access.clock.now_ns())
        self._stop_waiting()

    def consumed(self, request: Request, count: int) -> None:
        """Do nothing: a request that is looked up has no response to take."""

    def cancelled(self, request: Request) -> None:
        """Fail the request: no worker has it."""
        request.fail(RequestCancelled())

    def _wait(self) -> None:
        self._waits = True
        self._request.owner = self
        self._access.model.live.at_cache.add(self._request)

    def _stop_waiting(self) -> None:
        self._waits = False
        self._request.owner = None
        self._access.model.left_cache(self._request)

    # ---- the key -----------------------------------------------------------------------------

    async def _find_key(self) -> None:
        """Compute the key, then ask the cache. If that fails, let the model execute the request without the cache.

        It is not cancelled by the timeout, because a helper that is being started is started for all.
        """
        try:
            await self._copy_inputs_of_client()
            key = b"" if self._ended else await self._digest()
        except ServingError:
            self._execute_without_key()
        else:
            if not self._ended:
                self._ask(key)

    def _execute_without_key(self) -> None:
        """Let the model execute the request, and do not store its response."""
        if not self._ended:
            self._execute(store=False)

    async def _copy_inputs_of_client(self) -> None:
        """Replace inputs in regions of clients by copies, which clients cannot change. Raises `ServingError`."""
        for tensor in self._request.inputs:
            if self._ended:
                return
            place = tensor.span
            if place is None or not place.lease.region.of_client:
                continue
            read_from = place.shared()  # the request may end meanwhile
            try:
                copy = await self._access.regions.read(read_from)
            finally:
                read_from.lease.release()
            if self._ended:
                copy.lease.release()
            else:
                tensor.span = copy
                place.lease.release()

    async def _digest(self) -> bytes:
        """Return the key. Raises `ServingError`."""
        inputs = inputs_in_order(self._request)
        if sum(each.byte_size for each in inputs) <= HASHED_AT_ONCE:
            return digest(self._description, [each.raw() for each in inputs])
        peer = peer_of_sink(self._request.sink)
        return await digest_in_helper(self._access.helpers, self._description, inputs, peer)

    # ---- what was found ------------------------------------------------------------------------

    def _found(self, response: CachedResponse | None) -> None:
        """Respond with what the cache has, or let the model execute the request."""
        if self._ended:
            if response is not None:
                response.release()
        elif response is None or not self._fits(response):
            self._execute(store=response is None)
            if response is not None:
                response.release()
        elif self._targets():
            if not self._waits:
                self._wait()
            self._access.start(self._write(response))
        else:
            self._respond(response, response.outputs)

    def _execute(self, *, store: bool) -> None:
        """Let the model execute the request. Raises `ServingError` only within `begin`."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        request, access = self._request, self._access
        if store:
            lookup_ns = access.clock.now_ns() - self._begun_ns
            inner = request.passage or request.sink
            request.passage = StoringPassage(inner, access, self._key, self._salt, lookup_ns, self._expected)
        if not self._waits:
            access.model.submit(request)
            return
        try:
            access.model.submit(request)
        except ServingError as error:  # no scheduler runs
            request.fail(error)
        else:
            self._waits = False
            access.model.left_cache(request)  # not before: it is live without a break

    def _respond(self, response: CachedResponse, outputs: list[Tensor]) -> None:
        """Send the response from the cache."""
        self._ended = True
        request, access = self._request, self._access
        request.owner = None
        access.model.statistics.record_cache_hit(request, self._begun_ns, access.clock.now_ns())
        request.respond(
            Response(
                request.model_name, access.model.version_text, request.id, outputs, response.parameters,
                leased=response.leased or any(each.span is not None for each in outputs), cached=True,
            )
        )  # fmt: skip
        if self._waits:
            self._stop_waiting()

    # ---- outputs in regions of clients -------------------------------------------------------------

    def _targets(self) -> dict[str, Span]:
        """Return where the client wants outputs, by name; none of them is named twice."""
        return {each.name: each.span for each in self._request.outputs if each.span is not None}

    def _fits(self, response: CachedResponse) -> bool:
        """Whether each output has room where the client wants it. If not, the model says what is wrong."""
        targets = self._targets()
        return not targets or all(
            each.name not in targets or each.byte_size <= targets[each.name].byte_size for each in response.outputs
        )

    async def _write(self, response: CachedResponse) -> None:
        """Write outputs to the regions of the client, and respond."""
        targets = {name: span.shared() for name, span in self._targets().items()}
        responded = False
        try:
            outputs = [await self._placed(each, targets.get(each.name)) for each in response.outputs]
            if not self._ended:
                for output, cached in zip(outputs, response.outputs, strict=True):
                    if output is not cached:
                        cached.release()
                        output.span = output.span and output.span.shared()
                responded = True
                self._respond(response, outputs)
        except ServingError as error:  # the client has shortened the region, for example
            if not self._ended:
                self._request.fail(error)
        finally:
            if not responded:
                response.release()
            for target in targets.values():
                target.lease.release()

    async def _placed(self, output: Tensor, target: Span | None) -> Tensor:
        """Return `output`, or where it was written to in a region of the client. Raises `ServingError`."""
        if target is None:
            return output
        data = memoryview(output.raw())
        for begin in range(0, len(data), _WRITTEN_AT_ONCE):
            part = data[begin : begin + _WRITTEN_AT_ONCE]
            await self._access.regions.write(part, Span(target.lease, target.offset + begin, len(part)))
        return Tensor(output.name, output.datatype, output.shape, None, Span(target.lease, target.offset, len(data)))


def _small_and_here(request: Request) -> bool:
    """Whether the inputs can be hashed at once: they are small, and in memory that this process may read."""
    byte_size = 0
    for tensor in request.inputs:
        byte_size += tensor.byte_size
        if tensor.span is not None and tensor.span.lease.region.of_client:
            return False
    return byte_size <= HASHED_AT_ONCE


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


async def digest_in_helper(helpers: Helpers, description: bytes, inputs: Sequence[Tensor], peer: str) -> bytes:
    """Return the key of a request with these inputs, of which leases of its own are taken. Raises `ServingError`.

    `peer` is the client that waits.
    """
    key: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def ended(result: bytes | ServingError) -> None:
        if key.done():  # cancelled
            return
        if isinstance(result, bytes):
            key.set_result(result)
        else:
            key.set_exception(result)

    sources = [Tensor("", "UINT8", [each.byte_size], each.data, each.span and each.span.shared()) for each in inputs]
    task = MessageTask(DIGEST, description, sources, peer=peer, ended=ended)
    helpers.add(task)
    try:
        return await key
    except asyncio.CancelledError:
        helpers.cancel(task)
        raise

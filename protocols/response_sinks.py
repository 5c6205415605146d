"""Where front doors wait for responses: one, or a stream of them.

Both sinks own what they were sent until the front door takes it, and release what nobody takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kernel.errors import InternalError

if TYPE_CHECKING:
    from kernel.serving.kernel import Kernel
    from kernel.serving.request import Request
    from kernel.serving.response import Response


class OnlyResponse:
    """Collects what a call with one response must get: exactly one, which is final or followed by the flag."""

    __slots__ = ("_count", "_response")

    def __init__(self) -> None:
        self._response: Response | None = None
        self._count = 0

    def add(self, response: Response) -> bool:
        """Take one more response; whether it was the last, after which `take` is due."""
        if not response.empty:
            self._count += 1
            if self._response is not None:
                self._response.release()
            self._response = response
        return response.final

    def take(self) -> Response:
        """Return the response, which the caller releases. Raises `InternalError` where there was not one."""
        found, self._response = self._response, None
        if found is not None and self._count == 1:
            return found
        if found is not None:
            found.release()
        raise InternalError(f"expected a single response, got {self._count}")


class UnarySink:
    """Waits for the single response of a request."""

    def __init__(self) -> None:
        self._future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._only = OnlyResponse()

    def send(self, response: Response) -> None:
        if not self._only.add(response):
            return
        try:
            found = self._only.take()
        except InternalError as error:
            if not self._future.done():
                self._future.set_exception(error)
            return
        if self._future.done():  # nobody waits any more
            found.release()
        else:
            self._future.set_result(found)

    async def wait(self, kernel: Kernel, request: Request) -> Response:
        """Return the response of `request`, which may carry an error; the caller releases it.

        A caller that is cancelled cancels the request.
        """
        try:
            return await self._future
        except asyncio.CancelledError:
            # It may have come just before the caller was cancelled: nobody else will release it.
            if self._future.done() and not self._future.cancelled() and self._future.exception() is None:
                self._future.result().release()
            kernel.cancel(request)
            raise


class StreamSink:
    """A queue of responses of any number of requests, in the order in which they came.

    What bounds it is the credit of each request: a model gets no further than the client has taken.
    """

    def __init__(self) -> None:
        self._responses: deque[tuple[Request, Response]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def port(self) -> StreamPort:
        """Return a sink for one request on this stream; its `request` is set before it is submitted."""
        return StreamPort(self)

    @property
    def waiting(self) -> int:
        """How many responses nobody has taken."""
        return len(self._responses)

    async def next(self) -> tuple[Request, Response]:
        """Return the next response and its request; the caller releases the response."""
        while not self._responses:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        request, response = self._responses.popleft()
        request.consumed()
        return request, response

    def close(self) -> None:
        """Nobody takes responses any more: release what is here and what still comes."""
        self._closed = True
        while self._responses:
            self._responses.popleft()[1].release()

    def put(self, request: Request, response: Response) -> None:
        if self._closed:
            response.release()
            return
        self._responses.append((request, response))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamPort:
    """The sink of one request on a stream."""

    __slots__ = ("_stream", "request")

    def __init__(self, stream: StreamSink) -> None:
        self._stream = stream
        self.request: Request | None = None

    def send(self, response: Response) -> None:
        assert self.request is not None, "the port was not given its request"
        self._stream.put(self.request, response)

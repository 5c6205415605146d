"""How front doors get responses: exactly one, or a stream of them.

A stream owns the responses in it until the front door takes them, and releases those that are not taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kernel.errors import InternalError
from kernel.tracing.front_doors import HTTP, Reception, at_iteration_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.request import Request
    from kernel.serving.response import Response


class OnlyResponse:
    """Checks that a call with one response gets exactly one, which is final or followed by the final flag."""

    __slots__ = ("_count", "_response")

    def __init__(self) -> None:
        self._response: Response | None = None
        self._count = 0

    def add(self, response: Response) -> bool:
        """Take one more response. Returns whether it was the last one: then call `take`."""
        if not response.empty:
            self._count += 1
            if self._response is not None:
                self._response.release()
            self._response = response
        return response.final

    def take(self) -> Response:
        """Return the response, which the caller releases. Raises `InternalError` if there was not exactly one."""
        found, self._response = self._response, None
        if found is not None and self._count == 1:
            return found
        if found is not None:
            found.release()
        raise InternalError(f"expected a single response, got {self._count}")


class StreamSink:
    """A queue of responses of any number of requests, in the order in which they came.

    The credit of each request bounds it: a model may send only a limited number of responses that are not taken.
    """

    def __init__(self) -> None:
        self._responses: deque[tuple[Request, Response]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def port(self, header: Callable[[str], str]) -> StreamPort:
        """Return a sink for one request on this stream; its `request` is set before it is submitted.

        `header` is the method of `kernel.serving.response.Sink`.
        """
        return StreamPort(self, header)

    @property
    def waiting(self) -> int:
        """How many responses have not been taken."""
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
        """No more responses are taken: release those that are here, and those that still come."""
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

    __slots__ = ("_stream", "begin_ns", "header", "request")

    #: Such requests name no regions.
    peer = ""

    def __init__(self, stream: StreamSink, header: Callable[[str], str]) -> None:
        self._stream = stream
        self.header = header
        self.request: Request | None = None
        #: When the HTTP request came, in monotonic nanoseconds; 0 unless requests are traced.
        self.begin_ns = 0

    def reception(self) -> Reception:
        """See `kernel.tracing.front_doors.FrontDoorSink`."""
        return HTTP, self.begin_ns, 0, at_iteration_end

    def send(self, response: Response) -> None:
        request = self.request
        assert request is not None, "the port was not given its request"
        if response.final:
            self.request = None  # the request refers to its sink: such a cycle waits for the garbage collector
        self._stream.put(request, response)

"""How front doors get responses: exactly one, or a queue of them.

A queue owns the responses in it until the front door takes them, and releases those that are not taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kernel.errors import InternalError

if TYPE_CHECKING:
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


class ResponseQueue:
    """The responses of a request, in the order in which they came, for a coroutine.

    The credit of the request bounds it: a model may send only a limited number of responses that are not consumed.
    """

    def __init__(self) -> None:
        self._responses: deque[Response] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    async def next(self) -> Response:
        """Return the next response; the caller releases it."""
        while not self._responses:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._responses.popleft()

    def close(self) -> None:
        """No more responses are taken: release those that are here, and those that still come."""
        self._closed = True
        while self._responses:
            self._responses.popleft().release()

    def put(self, response: Response) -> None:
        if self._closed:
            response.release()
            return
        self._responses.append(response)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

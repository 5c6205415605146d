"""Responses that were written to a transport: memory of workers in them is given back when it has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from protocols.http.fast.response_bytes import ResponseBytes


class WrittenResponses:
    """Writes to one transport, whose writing is paused for as long as anything is left to write."""

    __slots__ = ("_releases",)

    def __init__(self) -> None:
        #: What is to be called when the transport keeps nothing of what was written to it.
        self._releases: list[Callable[[], None]] = []

    def write(self, transport: asyncio.Transport, responses: Sequence[ResponseBytes]) -> None:
        """Write `responses` in one call."""
        if len(responses) == 1 and not responses[0].parts:
            transport.write(responses[0].head)
            return
        transport.writelines([piece for each in responses for piece in (each.head, *each.parts)])
        self._releases += [each.release for each in responses if each.release is not None]
        if self._releases and not transport.get_write_buffer_size():
            self.release()

    def release(self) -> None:
        """The transport has nothing left to write, or is closed."""
        releases, self._releases = self._releases, []
        for release in releases:
            release()

"""Finds requests whose responses nobody takes: their readers lock others out of an instance. Pure.

A decoupled model waits when a client, or a model that has called it, has not taken a number of responses. The time of a
request begins when it is seen to wait, and begins again with each response that is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from kernel.serving.request import Request


class ReaderWaits:
    """The looks at the requests of one worker."""

    def __init__(self) -> None:
        #: When each request was first seen with the same mark.
        self._since_ns: dict[tuple[Request, Hashable], int] = {}

    def overdue(self, blocked: Mapping[Request, Hashable], now_ns: int, limit_ns: int) -> list[Request]:
        """Return the requests that have been blocked for `limit_ns` or longer.

        `blocked` are those that may not respond now, with marks that change with each response that is taken.
        """
        self._since_ns = {item: self._since_ns.get(item, now_ns) for item in blocked.items()}
        return [request for (request, _), since_ns in self._since_ns.items() if now_ns - since_ns >= limit_ns]

"""A batch: the requests that one instance executes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.request import Request


class Batch:
    """Requests bound for one instance. Whoever executes it answers every request exactly once."""

    __slots__ = ("dispatched_ns", "requests", "rows")

    def __init__(self, requests: list[Request], dispatched_ns: int) -> None:
        self.requests = requests
        #: Sum of the requests' rows.
        self.rows = sum(request.batch_size for request in requests)
        self.dispatched_ns = dispatched_ns

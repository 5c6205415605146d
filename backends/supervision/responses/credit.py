"""The credit of the streams of one worker: how many responses it may send before their clients have taken others. Pure.

A worker may have `wire.CREDIT_WINDOW` responses of a request under way. For those that the client takes it gets
credit, in portions: a stream does not need a message for each response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.transport import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from kernel.serving.request import Request

#: How many responses a portion of credit allows.
_PORTION = wire.CREDIT_WINDOW // 4


class StreamCredit:
    """The credit of all requests of one worker, by their numbers in messages."""

    def __init__(self, send: Callable[[wire.ToWorker], None]) -> None:
        self._send = send
        #: Responses that clients took without credit sent.
        self.unsent: dict[int, int] = {}
        #: Responses for which credit was sent.
        self.granted: dict[int, int] = {}

    def consumed(self, number: int, count: int) -> None:
        """The client took `count` responses of an unfinished request."""
        credit = self.unsent.get(number, 0) + count
        if credit >= _PORTION:
            self._send(wire.Credit(number, credit))
            self.granted[number] = self.granted.get(number, 0) + credit
            credit = 0
        self.unsent[number] = credit

    def forget(self, number: int) -> None:
        """The request has its final response, or is not executed any more."""
        self.unsent.pop(number, None)
        self.granted.pop(number, None)

    def blocked(self, requests: Mapping[int, Request]) -> dict[Request, Hashable]:
        """Return those of `requests`, all of the worker, for which it may send no response before others are taken, and
        marks that change with each that is. Without those of ensembles, whose later steps may take long."""
        granted, unsent = self.granted, self.unsent
        return {
            request: (request.response_count, granted.get(number, 0), unsent.get(number, 0))
            for number, request in requests.items()
            if request.response_count - granted.get(number, 0) >= wire.CREDIT_WINDOW
            and not (request.finished or request.cancelled)
            and (request.parent is None or request.parent.composed is None)
        }

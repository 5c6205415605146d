"""Responses of a model in the order of its requests (`preserve_ordering`), however many instances execute them. Pure.

A request gets its place when it is dispatched. Responses that come before those of earlier requests are kept, with
their leases, until those were passed on. A request that is never dispatched has no place: its error is sent at once.

A request that a model has made, by a call or as a step of an ensemble that it has called, has no place either: its
response is sent at once. Otherwise an earlier request whose model waits for that call would wait for itself. So no
execution ever waits for a response that is kept.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kernel.serving.model import Model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.request import Request
    from kernel.serving.response import Response, ResponseReceiver


class ResponseOrder:
    """The places of dispatched requests whose final response was not passed on yet."""

    def __init__(self) -> None:
        self._places: deque[_Place] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def reserve(self, requests: Iterable[Request]) -> None:
        """Give each request the next place, but for those of models. One that was dispatched before keeps its place."""
        for request in requests:
            if not isinstance(request.passage, _Place) and (request.parent is None or not _is_for_a_call(request)):
                place = request.passage = _Place(self, request.passage or request.sink)
                self._places.append(place)

    def is_first(self, place: _Place) -> bool:
        return self._places[0] is place

    def first_ended(self) -> None:
        """The first place got its final response: pass on what was kept back for the next ones."""
        self._places.popleft()
        while self._places and self._places[0].pass_on():
            self._places.popleft()


def _is_for_a_call(request: Request) -> bool:
    """Whether a model has made the request, or called the ensemble that has made it."""
    while (parent := request.parent) is not None:
        if not isinstance(parent.owner, Model) or parent.owner.spec.ensemble is None:
            return True
        request = parent
    return False


class _Place:
    """What the responses of a request pass that has a place. Implements `ResponseReceiver`."""

    __slots__ = ("_inner", "_kept", "_order")

    def __init__(self, order: ResponseOrder, inner: ResponseReceiver) -> None:
        self._order = order
        self._inner = inner
        self._kept: list[Response] = []

    def send(self, response: Response) -> None:
        if not self._order.is_first(self):
            self._kept.append(response)
            return
        self._inner.send(response)
        if response.final:
            self._order.first_ended()

    def pass_on(self) -> bool:
        """Send what was kept back; returns whether the final response was among it."""
        kept, self._kept = self._kept, []
        for response in kept:
            self._inner.send(response)
        return bool(kept) and kept[-1].final

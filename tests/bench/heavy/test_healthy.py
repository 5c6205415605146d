"""The healthy client's requests and connections."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.heavy import healthy
from bench.heavy.healthy import CONNECTIONS, INTERVAL_S, HealthySide


class ScriptedConnection:
    """Its response comes when it is read. It is its own socket, whose descriptor is its number."""

    _numbers = itertools.count()
    sent: list[int]

    def __init__(self, *_: object) -> None:
        self.number = next(self._numbers)
        self.socket = self

    def fileno(self) -> int:
        return self.number

    def exchange(self) -> None:
        """The first response comes."""

    def send(self) -> None:
        self.sent.append(self.number)

    def receive(self) -> bool:
        return True


class NoPoll:
    def register(self, *_: object) -> None:
        """Nothing is waited for."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the connections over which requests were sent."""
    numbers: list[int] = []
    monkeypatch.setattr(ScriptedConnection, "sent", numbers, raising=False)
    monkeypatch.setattr(ScriptedConnection, "_numbers", itertools.count())
    monkeypatch.setattr(healthy, "LoadConnection", ScriptedConnection)
    return numbers


def test_connections_are_used_in_turn_so_that_none_is_idle_for_long(sent: list[int]) -> None:
    poll: Any = NoPoll()
    side = HealthySide("http", 1, poll)
    for number in range(2 * CONNECTIONS):
        side.send_due(number * INTERVAL_S + INTERVAL_S / 2)
        side.receive(sent[-1])
    assert sent == [*range(CONNECTIONS)] * 2
    counted = side.counted()
    assert (counted.requests, counted.failures) == (2 * CONNECTIONS, [])

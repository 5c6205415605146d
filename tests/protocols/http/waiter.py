"""What a call tells its connection."""

from __future__ import annotations

from protocols.access import Peer


class Waiter:
    """The connection of calls, which counts their responses."""

    def __init__(self) -> None:
        self.peer = Peer(None)
        self.ready = 0

    def response_ready(self) -> None:
        self.ready += 1

    def request_prepared(self) -> None:
        """Nothing waits for it."""

"""What happens to calls when the server stops: new inference is refused, and calls without an end are ended."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from kernel.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocols.intake.intake import Intake


class ServerShuttingDown(Unavailable):
    """An inference call arrived, or a stream was still open, while the server stops."""

    def __init__(self) -> None:
        super().__init__("GRPC server is shutting down and has stopped accepting new requests.")


class LongCall(Protocol):
    """A call that has no end of its own: it waits for its client, or for something to change."""

    def stop(self) -> None:
        """End soon: accept nothing new, finish what was started."""


class OpenCalls:
    """Records the calls that do not end by themselves, and whether new ones are accepted."""

    def __init__(self) -> None:
        self.stopping = False
        self._long_calls: set[LongCall] = set()
        self._intakes: list[Intake] = []

    def add_intake(self, intake: Intake) -> None:
        """Let `intake` take no more requests once the server stops."""
        self._intakes.append(intake)

    def check_accepting(self) -> None:
        """Raise `ServerShuttingDown` once the server stops."""
        if self.stopping:
            raise ServerShuttingDown

    @contextlib.contextmanager
    def stoppable(self, call: LongCall) -> Iterator[None]:
        """Stop `call` when the server stops while the block runs; at once if it is stopping already."""
        self._long_calls.add(call)
        if self.stopping:
            call.stop()
        try:
            yield
        finally:
            self._long_calls.discard(call)

    def stop(self) -> None:
        """Accept no more inference calls, and stop the long calls."""
        self.stopping = True
        for intake in self._intakes:
            intake.refusal = ServerShuttingDown()
        for call in tuple(self._long_calls):
            call.stop()

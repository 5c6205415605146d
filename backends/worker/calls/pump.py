"""A thread that reads the connection while an event loop awaits calls, since the loop cannot wait for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from backends.worker.message_reader import KernelGone

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.worker.calls.interface import ModelCall
    from backends.worker.message_reader import KernelMessageReader


class CallPump:
    """The thread. It is started when it is first needed, and waits while no call is awaited."""

    def __init__(self, reader: Callable[[], KernelMessageReader], on_lost: Callable[[], None]) -> None:
        self._reader = reader
        self._on_lost = on_lost
        self._awaited: set[ModelCall] = set()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    def read_for(self, call: ModelCall) -> None:
        """Read until `call` has ended."""
        with self._changed:
            self._awaited.add(call)
            if call.ended:  # meanwhile
                self._awaited.discard(call)
            elif self._thread is None:
                self._thread = threading.Thread(target=self._run, name="calls", daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def ended(self, call: ModelCall) -> None:
        """`call` has got its final response."""
        if self._awaited:
            with self._lock:
                self._awaited.discard(call)

    def _run(self) -> None:
        awaited = self._awaited
        try:
            while True:
                with self._changed:
                    while not awaited:
                        self._changed.wait()
                self._reader().wait_until(lambda: not awaited)
        except (KernelGone, OSError):
            self._on_lost()

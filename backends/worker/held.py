"""Inputs that a model goes on using after it has answered: a state, a last frame, whatever it keeps.

Arrays of large inputs are views of memory that others write to as soon as the request is answered: the kernel
to its arena, a client to its region. So the kernel is told which inputs it must leave alone, and later that
they are free. A client cannot be told: a model that keeps inputs there is given copies from then on.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from backends.transport import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shm.arrays import Array


class HeldInputs:
    """Knows of each input whether anything refers to it still. An input is watched by an array over all of it."""

    def __init__(self, send: Callable[[wire.ToKernel], None], on_foreign_held: Callable[[], None]) -> None:
        """`on_foreign_held` is called when a model has kept an input that lies in a client's memory."""
        self._send = send
        self._on_foreign_held = on_foreign_held
        #: Inputs of requests that are not answered, and whether each lies in a client's memory. To look at only.
        self.watched: dict[int, list[tuple[weakref.ref[Array], bool]]] = {}
        #: Those that the kernel knows to be held, and requests of those that have gone meanwhile.
        self._held: dict[int, list[weakref.ref[Array]]] = {}
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()

    def watch(self, number: int, data: memoryview, *, foreign: bool) -> memoryview:
        """Return a view of `data`, an input of request `number`, to be used instead."""
        # Arrays refer to the object that exports their memory, and not to the memoryview that they are made from.
        exporter = np.asarray(data)
        self.watched.setdefault(number, []).append((weakref.ref(exporter), foreign))
        return exporter.data

    def answered(self, numbers: Sequence[int], *, finally_used: bool = True) -> list[int]:
        """Before the final answers of these requests leave, tell the kernel which of their inputs are held.

        Returns those of whose inputs in the arena some are. Not `finally_used`: whoever answers is still about to
        return from what it does with them.
        """
        held: list[int] = []
        foreign_held = False
        with self._lock:
            for number in numbers:
                living = [
                    (data, foreign) for each, foreign in self.watched.pop(number, ()) if (data := each()) is not None
                ]
                foreign_held = foreign_held or any(foreign for _, foreign in living)
                if inputs := [data for data, foreign in living if not foreign]:
                    self._hold(number, inputs)
                    held.append(number)
            if held:
                self._send(wire.InputsHeld(held))
        if foreign_held and finally_used:
            self._on_foreign_held()
        return held

    def _hold(self, number: int, inputs: list[Array]) -> None:
        """Have the end of `inputs` noticed."""

        def gone(_: weakref.ref[Array]) -> None:
            self._gone.append(number)  # nothing else: it may be called in the middle of anything

        self._held[number] = [weakref.ref(data, gone) for data in inputs]

    def let_go(self) -> None:
        """Tell the kernel which inputs are held no longer."""
        if not self._gone:
            return
        with self._lock:
            freed: list[int] = []
            while self._gone:
                number = self._gone.popleft()
                if number in self._held and all(each() is None for each in self._held[number]):
                    del self._held[number]
                    freed.append(number)
            if freed:
                self._send(wire.InputsFreed(freed))

"""Inputs that a model goes on using after its final response: a state, a last frame.

Arrays of large inputs are views of memory that others write to as soon as the response is sent: the kernel to its
arena, another worker to its outputs, a client to its region. So the kernel hears which inputs it must leave alone, and
later that they are free. A client does not: a model that keeps inputs in a client's region gets copies from then on.
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

    from backends.worker.memory import WorkerRegion
    from shm.arrays import Array


class _Watched:
    """An input in shared memory, and an array over all of it, which lives as long as any array over a part of it."""

    __slots__ = ("array", "byte_size", "offset", "region")

    def __init__(self, region: WorkerRegion, offset: int, byte_size: int, array: Array) -> None:
        self.region = region
        self.offset = offset
        self.byte_size = byte_size
        self.array = weakref.ref(array)

    @property
    def alive(self) -> bool:
        return self.array() is not None

    def end(self) -> None:
        """Nothing refers to the input any more."""
        self.region.ended(self.offset, self.byte_size)


class HeldInputs:
    """Knows of each input in shared memory whether anything still refers to it."""

    def __init__(self, send: Callable[[wire.ToKernel], None], on_volatile_held: Callable[[], None]) -> None:
        """`on_volatile_held` is called when a model has kept an input that lies in a client's memory."""
        self._send = send
        self._on_volatile_held = on_volatile_held
        #: Inputs of requests without a final response, by request number. To look at only.
        self.watched: dict[int, list[_Watched]] = {}
        #: Inputs that the kernel knows to be held, and requests of inputs that have gone meanwhile.
        self._held: dict[int, list[_Watched]] = {}
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()

    def watch(self, number: int, region: WorkerRegion, offset: int, byte_size: int) -> memoryview:
        """Return the bytes of an input of request `number`, which is watched from now on unless it is a copy.

        Raises `InvalidArgument` where the owner of the region has shortened it.
        """
        view = region.input_view(offset, byte_size)
        if type(view.obj) is bytearray:
            return view
        # Arrays refer to the object that exports their memory, and not to the memoryview that they are made from.
        exporter = np.asarray(view)
        self.watched.setdefault(number, []).append(_Watched(region, offset, byte_size, exporter))
        return exporter.data

    def ended(self, numbers: Sequence[int], *, backend_returned: bool = True) -> list[int]:
        """Tell the kernel, before the final responses of these requests are sent, which of their inputs are held.

        Returns the requests of whose inputs outside of client regions some are held. Without `backend_returned` the
        caller is still within the model's code, which may have an input on its stack: that is not taken for a model
        that keeps inputs of clients.
        """
        held: list[int] = []
        volatile_held = False
        with self._lock:
            for number in numbers:
                living: list[_Watched] = []
                for each in self.watched.pop(number, ()):
                    if not each.alive:
                        each.end()
                    elif each.region.volatile:
                        volatile_held = True
                    else:
                        living.append(each)
                if living:
                    self._hold(number, living)
                    held.append(number)
            if held:
                self._send(wire.InputsHeld(held))
        if volatile_held and backend_returned:
            self._on_volatile_held()
        return held

    def _hold(self, number: int, inputs: list[_Watched]) -> None:
        """Notice when the last array over each of `inputs` is gone."""

        def gone(_: weakref.ref[Array]) -> None:
            self._gone.append(number)  # nothing else: the collector calls it in the middle of anything

        self._held[number] = inputs
        for each in inputs:
            array = each.array()
            if array is None:
                self._gone.append(number)
            else:
                each.array = weakref.ref(array, gone)

    def let_go(self) -> None:
        """Tell the kernel which inputs are held no longer."""
        if not self._gone:
            return
        with self._lock:
            freed: list[int] = []
            while self._gone:
                number = self._gone.popleft()
                if number in self._held and not any(each.alive for each in self._held[number]):
                    for each in self._held.pop(number):
                        each.end()
                    freed.append(number)
            if freed:
                self._send(wire.InputsFreed(freed))

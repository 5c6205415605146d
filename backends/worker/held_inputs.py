"""Held inputs: a model still uses them after its final response, for example as a state or a last frame.

The array of a large input is a view of memory that another process writes to after the response: the kernel in its
arena, another worker in its outputs, a client in its region. So the worker reports held inputs to the kernel, which
leaves their blocks unchanged, and later reports that they are free. A client gets no such report: after a model has
held an input in a client's region, such inputs are copied.

Results of calls of other models are held as well, from the start: the kernel leases them until the worker reports that
the model has dropped them.

Releases results that the model drops while its worker is idle, when no message is sent that could report them.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.transport import wire
from shm.arrays import array_address
from shm.lease import RegionNumber
from shm.tensor import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.worker.memory import WorkerRegion
    from shm.arrays import Array


class WatchedInput:
    """An input in shared memory, with a weak reference to the array from which all its other arrays are made."""

    __slots__ = ("array", "byte_size", "offset", "region")

    def __init__(self, region: WorkerRegion, offset: int, byte_size: int, array: Any) -> None:
        """`array` may be another object that owns the use of the memory."""
        self.region = region
        self.offset = offset
        self.byte_size = byte_size
        self.array: weakref.ref[Any] = weakref.ref(array)

    @property
    def alive(self) -> bool:
        return self.array() is not None

    def end(self) -> None:
        """No array refers to the input any more: release its memory."""
        self.region.ended(self.offset, self.byte_size)


class HeldInputs:
    """Knows for each input in shared memory whether an array still refers to it."""

    def __init__(self, send: Callable[[wire.ToKernel], None], on_volatile_held: Callable[[], None]) -> None:
        """`on_volatile_held` is called when a model has held an input in a client's region."""
        self._send = send
        self._late_release = LateRelease(self.report_freed)
        self._on_volatile_held = on_volatile_held
        #: Inputs of requests without a final response, by request number. Read-only for other objects.
        self.watched: dict[int, list[WatchedInput]] = {}
        #: Held inputs that were reported to the kernel, and numbers of requests of which an input may be free now.
        #: Results of calls have the numbers of their leases below 0.
        self._held: dict[int, list[WatchedInput]] = {}
        self._maybe_free: deque[int] = deque()
        #: Results of calls by the identity of the array over their memory, to find those that are given to a call; and
        #: that identity by the number of the lease.
        self._results: dict[int, WatchedInput] = {}
        self._identities: dict[int, int] = {}
        self._lock = threading.Lock()

    def watch(self, number: int, region: WorkerRegion, offset: int, byte_size: int) -> memoryview:
        """Return the bytes of an input of request `number`, which is watched from now on unless it is a copy.

        Raises `InvalidArgument` if the owner of the region has shortened it.
        """
        view = region.input_view(offset, byte_size)
        if type(view.obj) is bytearray:
            return view
        # An array refers to the exporter of its memory, not to the memoryview from which it was made.
        exporter = np.asarray(view)
        self.watched.setdefault(number, []).append(WatchedInput(region, offset, byte_size, exporter))
        return exporter.data

    def watch_memory(self, number: int, watched: WatchedInput) -> None:
        """Watch an input of request `number` that is not read by this object: it is on a device."""
        self.watched.setdefault(number, []).append(watched)

    def ended(self, numbers: Sequence[int], *, backend_returned: bool = True) -> list[int]:
        """Report held inputs of these requests to the kernel, before their final responses are sent.

        Returns the numbers of the requests with held inputs outside of client regions. Without `backend_returned` the
        model's code still runs and may have an input on its stack. Then an input in a client's region does not count
        as held.
        """
        held: list[int] = []
        volatile_held = False
        with self._lock:
            for number in numbers:
                living: list[WatchedInput] = []
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

    def _hold(self, number: int, inputs: list[WatchedInput]) -> None:
        """Notice when the arrays of each of `inputs` are freed."""

        def on_array_freed(_: weakref.ref[Array]) -> None:
            # Nothing that locks: the garbage collector can call it at any point.
            self._maybe_free.append(number)
            if number < 0:
                self._late_release.signal()

        self._held[number] = inputs
        for each in inputs:
            array = each.array()
            if array is None:
                self._maybe_free.append(number)
            else:
                each.array = weakref.ref(array, on_array_freed)

    def hold_result(self, lease: int, region: WorkerRegion, offset: int, byte_size: int) -> memoryview:
        """Return the bytes of a result of a call, which has `lease`. It is reported when the model has dropped it.

        A view of a bytearray is a copy: nobody needs the lease any more, and this is reported soon.
        """
        self._late_release.start()
        view = region.input_view(offset, byte_size)
        if type(view.obj) is bytearray:
            self.drop_result(lease)
            return view
        exporter = np.asarray(view)
        watched = WatchedInput(region, offset, byte_size, exporter)
        with self._lock:
            self._identities[lease] = id(exporter)
            self._results[id(exporter)] = watched
            self._hold(-lease, [watched])
        return exporter.data

    def hold_memory(self, lease: int, watched: WatchedInput) -> None:
        """As `hold_result`, for a result that is not read by this object: it is on a device."""
        self._late_release.start()
        with self._lock:
            self._hold(-lease, [watched])

    def drop_result(self, lease: int) -> None:
        """Report soon that a result of a call is no longer needed."""
        self._held[-lease] = []
        self._maybe_free.append(-lease)
        self._late_release.start()
        self._late_release.signal()

    def place_of(self, array: Array, *, executing: bool) -> Span | None:
        """Return where the kernel finds the bytes of `array`: in an input or a result of a call that the model uses.

        None for an array that is elsewhere, or that the kernel may see otherwise than the model. An input in a client's
        region counts only if its request is `executing` for certain: nobody holds it longer.
        """
        base: object = array
        while isinstance(base, np.ndarray):
            base = base.base
        exporter: Any = base.obj if isinstance(base, memoryview) else None
        if not isinstance(exporter, np.ndarray):
            return None
        watched = self._results.get(id(exporter))
        if watched is None or watched.array() is not exporter:
            inputs = [*self.watched.values(), *self._held.values()]
            watched = next((each for some in inputs for each in some if each.array() is exporter), None)
        if watched is None:
            return None
        start = array_address(array)
        skip = start - array_address(exporter)
        region = watched.region
        if not 0 <= skip <= watched.byte_size - array.nbytes:
            return None
        if not (executing and region.in_place if region.volatile else region.seen_by_all(start, array.nbytes)):
            return None
        return Span(RegionNumber(region.number), watched.offset + skip, array.nbytes)

    def report_freed(self) -> None:
        """Report to the kernel which inputs and results are no longer held."""
        if not self._maybe_free:
            return
        with self._lock:
            freed: list[int] = []
            released: list[int] = []
            while self._maybe_free:
                number = self._maybe_free.popleft()
                if number in self._held and not any(each.alive for each in self._held[number]):
                    for each in self._held.pop(number):
                        each.end()
                        if number < 0:
                            self._forget_result(-number, each)
                    (freed if number > 0 else released).append(abs(number))
            if released:
                self._send(wire.Released(released))
            if freed:
                self._send(wire.InputsFreed(freed))

    def _forget_result(self, lease: int, watched: WatchedInput) -> None:
        identity = self._identities.pop(lease, None)  # None for a result on a device
        if identity is not None and self._results.get(identity) is watched:
            del self._results[identity]  # else a newer result has an array at the same address


#: How long what was dropped may wait, so that most is released by what the worker does anyway, in seconds.
DELAY_S = 0.05


class LateRelease:
    """A thread that releases what was dropped, some time later. It is started when there is something to drop."""

    def __init__(self, release: Callable[[], None], delay_s: float = DELAY_S) -> None:
        """`release` is called by the thread; nothing need be left for it."""
        self._release = release
        self._delay_s = delay_s
        # SimpleQueue.put may be called by a finalizer that interrupts another put.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._signalled = False
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self.thread is None:
            with self._lock:
                if self.thread is None:
                    self.thread = threading.Thread(target=self._run, name="late release", daemon=True)
                    self.thread.start()

    def signal(self) -> None:
        """Something was dropped. The garbage collector may call this at any point: it uses no lock."""
        if not self._signalled:
            self._signalled = True
            self._signals.put(None)

    def _run(self) -> None:
        try:
            while True:
                self._signals.get()
                time.sleep(self._delay_s)
                self._signalled = False  # first: what is dropped from now on has a signal of its own
                self._release()
        except OSError:  # the kernel is gone
            return

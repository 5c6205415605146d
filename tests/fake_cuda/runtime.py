"""The functions of `cuda.bindings.runtime` that clients and workers use.

Copies on a stream are made when the stream is waited for: who forgets that gets old bytes. Copies and computations can
be given a duration; then events say when they are reached on a clock of this module, without any wait. As in CUDA, each
thread has a current device (0 at first), the handles 0 to 2 mean streams of that device, an event can only be recorded
on a stream of the device that it was made on, and memory is filled and graphs are launched only on streams of the
current device. Most functions make a context of the current device, if the process has none there. A computation that
stores vectors at an address for which it is not made is an error of all calls after it (`lose_device`).

One file, because it stands for one module of CUDA's bindings.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import mmap
import os
import threading
import time
from typing import Any

from tests.fake_cuda import memory

CUDA_IPC_HANDLE_SIZE = 64
cudaIpcMemLazyEnablePeerAccess = 1
cudaStreamNonBlocking = 1
cudaEventBlockingSync = 1
cudaEventDisableTiming = 2
cudaHostAllocPortable = 1
cudaHostRegisterPortable = 1


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorDeviceUninitialized = 201
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorHostMemoryAlreadyRegistered = 712
    cudaErrorHostMemoryNotRegistered = 713
    cudaErrorMisalignedAddress = 716
    cudaErrorNotSupported = 801


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3
    cudaMemcpyDefault = 4


class cudaDeviceAttr(enum.IntEnum):
    cudaDevAttrUnifiedAddressing = 41
    cudaDevAttrIpcEventSupport = 125


_SUCCESS = cudaError_t.cudaSuccess
_OK = (_SUCCESS,)
INVALID = (cudaError_t.cudaErrorInvalidValue, None)

#: `device` is the current device of a thread.
_current = threading.local()


def _current_device() -> int:
    return getattr(_current, "device", 0)


#: The devices on which this process has a context.
contexts: set[int] = set()

#: The error after which nothing works any more; empty if there was none.
_lost: list[cudaError_t] = []


def lose_device(error: cudaError_t) -> None:
    """A computation has failed: all calls return this error from now on."""
    _lost[:] = [error]


def find_device() -> None:
    """Forget `lose_device`."""
    _lost.clear()


class cudaIpcMemHandle_t:
    """The 64 bytes, at an address."""

    def __init__(self) -> None:
        self._bytes = (ctypes.c_char * CUDA_IPC_HANDLE_SIZE)()

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


#: Streams by their addresses, for as long as the process lives: libraries give addresses.
streams: dict[int, Stream] = {}

#: Memory of the host that was pinned, by address; and how often memory was allocated, for tests that count.
pinned: dict[int, Any] = {}

#: Memory of the host that was pinned where it is: address → bytes.
registered: dict[int, int] = {}


#: Streams wait for one another, and any thread may wait for them: one at a time.
_running = threading.RLock()


class Clock:
    """The time of the host and of the devices, and what takes how long, in milliseconds. No call takes time itself."""

    host_ms = 0.0
    #: With two zeros, events say when they were really reached.
    copy_ms = 0.0
    execution_ms = 0.0

    def reset(self, copy_ms: float = 0.0, execution_ms: float = 0.0) -> None:
        """Begin again."""
        self.host_ms, self.copy_ms, self.execution_ms = 0.0, copy_ms, execution_ms
        for stream in streams.values():
            stream.end_ms = 0.0

    def wait(self, until_ms: float) -> None:
        """The host has waited."""
        self.host_ms = max(self.host_ms, until_ms)


clock = Clock()


class Stream:
    """Copies that are not made yet, and events of other streams that come before them."""

    def __init__(self, device: int | None = None) -> None:
        self.device = _current_device() if device is None else device
        #: Copies, and objects with a method `run`: events, and what libraries compute.
        self.work: list[Any] = []
        #: What was enqueued before a capture began, during one.
        self.before_capture: list[Any] | None = None
        #: How many entries were done.
        self.done = 0
        self.waits = 0
        #: When all of it is done, on the clock, and when the last entries were really done: number → seconds.
        self.end_ms = 0.0
        self.done_at_s: dict[int, float] = {}
        streams[id(self)] = self

    def takes(self, duration_ms: float) -> None:
        """What was enqueued last takes this long."""
        self.end_ms = max(self.end_ms, clock.host_ms) + duration_ms

    def getPtr(self) -> int:
        return id(self)

    def __int__(self) -> int:
        return id(self)

    def run(self, until: int | None = None) -> None:
        """Do what was enqueued, or what came before the entry `until`, counted from the begin of the stream."""
        with _running:
            until = self.done + len(self.work) if until is None else until
            while self.work and self.done < until:
                entry = self.work.pop(0)  # first: an event in it may come back to this stream
                self.done += 1
                if isinstance(entry, tuple):
                    ctypes.memmove(*entry)
                else:
                    entry.run()
                self.done_at_s[self.done] = time.monotonic()
                if len(self.done_at_s) > 1000:
                    del self.done_at_s[next(iter(self.done_at_s))]


def forget_work() -> None:
    """Let nothing be done that is still enqueued: other tests did not wait for it, and its memory is gone."""
    for stream in streams.values():
        stream.done += len(stream.work)
        stream.work.clear()


class SpecialStream:
    """The handles 0 and 1 (the legacy default stream) and 2 (the thread's): which stream is meant is decided at use."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def getPtr(self) -> int:
        return self._handle

    def __int__(self) -> int:
        return self._handle

    @property
    def meant(self) -> Stream:
        """The stream of the thread's current device."""
        device = _current_device()
        thread = threading.get_ident() if self._handle == 2 else 0
        found = _special.get((device, thread))
        if found is None:
            found = _special[device, thread] = Stream(device)
        return found

    @property
    def waits(self) -> int:
        return self.meant.waits

    @property
    def work(self) -> list[Any]:
        return self.meant.work

    def run(self) -> None:
        self.meant.run()


#: The default streams: (device, thread or 0) → stream.
_special: dict[tuple[int, int], Stream] = {}


def _meant(stream: Stream | SpecialStream) -> Stream:
    return stream.meant if isinstance(stream, SpecialStream) else stream


class Event:
    """A point in the work of a stream."""

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.device = _current_device()
        self.stream: Stream | None = None
        self.count = 0
        self.at_ms = 0.0

    def run(self) -> None:
        if self.stream is not None:
            self.stream.run(self.count)


def cudaStream_t(address: int) -> Stream | SpecialStream:
    """Return the stream at an address. 0 to 2 are the default streams that every process has."""
    return SpecialStream(address) if address in (0, 1, 2) else streams[address]


def cudaGetDeviceCount() -> tuple[cudaError_t, int]:
    count = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
    return (_SUCCESS, count) if count else (cudaError_t.cudaErrorNoDevice, 0)


def cudaGetDevice() -> tuple[cudaError_t, int]:
    return _SUCCESS, _current_device()


def cudaSetDevice(device: int) -> tuple[cudaError_t]:
    if not 0 <= device < cudaGetDeviceCount()[1]:
        return (cudaError_t.cudaErrorInvalidDevice,)
    _current.device = device
    return _OK


def cudaMalloc(byte_size: int) -> tuple[cudaError_t, int | None]:
    try:
        return _SUCCESS, memory.allocate(byte_size, _current_device())
    except OSError:
        return cudaError_t.cudaErrorMemoryAllocation, None


def cudaFree(address: Any) -> tuple[cudaError_t]:
    return _OK if memory.free(int(address)) else INVALID[:1]


def cudaIpcGetMemHandle(address: Any) -> tuple[cudaError_t, cudaIpcMemHandle_t | None]:
    raw = memory.handle_of(int(address))
    if raw is None:
        return INVALID
    handle = cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), raw, CUDA_IPC_HANDLE_SIZE)
    return _SUCCESS, handle


def cudaIpcOpenMemHandle(handle: cudaIpcMemHandle_t, flags: int) -> tuple[cudaError_t, int | None]:
    if flags != cudaIpcMemLazyEnablePeerAccess:
        return INVALID
    try:
        return _SUCCESS, memory.open_handle(ctypes.string_at(handle.getPtr(), CUDA_IPC_HANDLE_SIZE))
    except PermissionError:
        return cudaError_t.cudaErrorDeviceUninitialized, None
    except OSError:
        return cudaError_t.cudaErrorInvalidResourceHandle, None
    except ValueError:
        return INVALID


def cudaIpcCloseMemHandle(address: Any) -> tuple[cudaError_t]:
    return _OK if memory.close_handle(int(address)) else INVALID[:1]


def cudaMemcpyAsync(target: Any, source: Any, byte_size: int, kind: Any, stream: Any) -> tuple[cudaError_t]:
    copy = _address(target), _address(source), byte_size
    if any(_is_pinned_in_part(address, byte_size) for address in copy[:2]):
        return INVALID[:1]
    if isinstance(stream, (Stream, SpecialStream)):
        stream.work.append(copy)
        crosses = any(memory.range_of(address) is None for address in copy[:2])
        _meant(stream).takes(clock.copy_ms if crosses else 0.0)
    else:
        ctypes.memmove(*copy)
    return _OK


def _is_pinned_in_part(address: int, byte_size: int) -> bool:
    end = address + byte_size
    return any(
        start < end and address < start + size and not start <= address <= end <= start + size
        for start, size in registered.items()
    )


def cudaMemcpy(target: Any, source: Any, byte_size: int, kind: Any) -> tuple[cudaError_t]:
    return cudaMemcpyAsync(target, source, byte_size, kind, None)


def cudaStreamCreate() -> tuple[cudaError_t, Stream]:
    return _SUCCESS, Stream()


def cudaStreamCreateWithFlags(flags: int) -> tuple[cudaError_t, Stream]:
    return cudaStreamCreate()


def cudaStreamSynchronize(stream: Any) -> tuple[cudaError_t]:
    if isinstance(stream, (Stream, SpecialStream)):
        found = _meant(stream)
        found.waits += 1
        found.run()
        clock.wait(found.end_ms)
    return _OK


def cudaEventCreateWithFlags(flags: int) -> tuple[cudaError_t, Event]:
    return _SUCCESS, Event(flags)


def cudaEventRecord(event: Event, stream: Stream | SpecialStream) -> tuple[cudaError_t]:
    found = _meant(stream)
    if found.device != event.device:
        return (cudaError_t.cudaErrorInvalidResourceHandle,)
    with _running:  # not between an entry and its number
        event.stream, event.count = found, found.done + len(found.work)
    event.at_ms = max(found.end_ms, clock.host_ms)
    return _OK


def cudaEventElapsedTime(first: Event, second: Event) -> tuple[cudaError_t, float | None]:
    for event in (first, second):
        if event.flags & cudaEventDisableTiming or event.stream is None:
            return cudaError_t.cudaErrorInvalidResourceHandle, None
        if event.stream.done < event.count:
            return cudaError_t.cudaErrorNotReady, None
    if clock.copy_ms or clock.execution_ms:
        return _SUCCESS, second.at_ms - first.at_ms
    begin_s, end_s = (event.stream.done_at_s.get(event.count, 0.0) for event in (first, second) if event.stream)
    return _SUCCESS, 1000 * (end_s - begin_s) if begin_s and end_s else 0.0


def cudaEventQuery(event: Event) -> tuple[cudaError_t]:
    """Nothing is done before it is waited for, unless all work was waited for already."""
    stream = event.stream
    if stream is None or stream.done >= event.count:
        return _OK
    return (cudaError_t.cudaErrorNotReady,)


def cudaEventSynchronize(event: Event) -> tuple[cudaError_t]:
    if event.stream is not None:
        event.stream.waits += 1
    event.run()
    clock.wait(event.at_ms)
    return _OK


def cudaStreamWaitEvent(stream: Stream | SpecialStream, event: Event, flags: int) -> tuple[cudaError_t]:
    point = Event(event.flags)
    point.stream, point.count = event.stream, event.count
    found = _meant(stream)
    found.work.append(point)
    found.end_ms = max(found.end_ms, event.at_ms)
    return _OK


def cudaHostAlloc(byte_size: int, flags: int) -> tuple[cudaError_t, int]:
    block = (ctypes.c_char * max(byte_size, 1))()
    pinned[ctypes.addressof(block)] = block
    return _SUCCESS, ctypes.addressof(block)


def cudaFreeHost(address: Any) -> tuple[cudaError_t]:
    return _OK if pinned.pop(int(address), None) is not None else INVALID[:1]


def cudaHostRegister(address: int, byte_size: int, flags: int) -> tuple[cudaError_t]:
    """Pin memory. Its addresses are those of pages; a copy of it that is still to be made when it is unpinned is an
    error of the test."""
    if os.environ.get("FAKE_CUDA_PINS_NOTHING"):
        return (cudaError_t.cudaErrorNotSupported,)
    if address % mmap.PAGESIZE or not byte_size or flags != cudaHostRegisterPortable:
        return INVALID[:1]
    if any(start < address + byte_size and address < start + size for start, size in registered.items()):
        return (cudaError_t.cudaErrorHostMemoryAlreadyRegistered,)
    registered[address] = byte_size
    return _OK


def cudaHostUnregister(address: int) -> tuple[cudaError_t]:
    if address not in registered:
        return (cudaError_t.cudaErrorHostMemoryNotRegistered,)
    end = address + registered.pop(address)
    for stream in list(streams.values()):
        copies = [entry for entry in list(stream.work) if isinstance(entry, tuple)]
        if any(address <= place < end for entry in copies for place in entry[:2]):
            return (cudaError_t.cudaErrorIllegalAddress,)  # as the real one does when the copy is made
    return _OK


def cudaDeviceSynchronize() -> tuple[cudaError_t]:
    for stream in list(streams.values()):
        stream.run()
    return _OK


def cudaMemGetInfo() -> tuple[cudaError_t, int, int]:
    used = sum(mapping.byte_size for mapping, _ in memory.own.values() if mapping.device == _current_device())
    return _SUCCESS, TOTAL_BYTE_SIZE - used - int(os.environ.get("FAKE_CUDA_USED", "0")), TOTAL_BYTE_SIZE


class _Uuid:
    def __init__(self, octets: bytes) -> None:
        self.bytes = octets


class cudaDeviceProp:
    def __init__(self, device: int) -> None:
        self.name = b"Fake GPU"
        self.uuid = _Uuid(bytes(15) + bytes([device]))
        self.major, self.minor = map(int, os.environ.get("FAKE_CUDA_CAPABILITY", "9.0").split("."))
        self.totalGlobalMem = TOTAL_BYTE_SIZE


#: The memory of each device.
TOTAL_BYTE_SIZE = 1 << 30


def cudaGetDeviceProperties(device: int) -> tuple[cudaError_t, cudaDeviceProp | None]:
    if not 0 <= device < cudaGetDeviceCount()[1]:
        return cudaError_t.cudaErrorInvalidDevice, None
    return _SUCCESS, cudaDeviceProp(device)


#: Streams and events that were destroyed, for tests.
destroyed: list[Any] = []


def cudaStreamDestroy(stream: Any) -> tuple[cudaError_t]:
    destroyed.append(stream)
    return _OK


def cudaEventDestroy(event: Event) -> tuple[cudaError_t]:
    destroyed.append(event)
    return _OK


def cudaDeviceGetAttribute(attribute: Any, device: int) -> tuple[cudaError_t, int]:
    return _SUCCESS, 1


def cudaGetErrorString(error: cudaError_t) -> tuple[cudaError_t, bytes]:
    return _SUCCESS, error.name.encode()


def cudaGetLastError() -> tuple[cudaError_t]:
    return _OK


def _address(value: Any) -> int:
    """Return the address of what the functions of cuda-bindings take: an address, an array of ctypes, bytes."""
    if isinstance(value, ctypes.Array):
        return ctypes.addressof(value)
    if isinstance(value, bytes):
        return ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value or 0
    return int(value)


# ---- graphs, priorities ---------------------------------------------------------------------------


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


class Graph:
    """What was enqueued during a capture, to be enqueued again as it is."""

    def __init__(self, work: list[Any]) -> None:
        self.work = work


class Fill:
    """Zeros in memory, when it is the stream's turn."""

    def __init__(self, address: int, value: int, byte_size: int) -> None:
        self._arguments = address, value, byte_size

    def run(self) -> None:
        ctypes.memset(*self._arguments)


#: How often graphs were launched, for tests that count.
launches: list[Graph] = []


def cudaMemsetAsync(address: Any, value: int, byte_size: int, stream: Stream) -> tuple[cudaError_t]:
    if stream.device != _current_device():
        return (cudaError_t.cudaErrorInvalidResourceHandle,)
    stream.work.append(Fill(int(address), value, byte_size))
    return _OK


def cudaDeviceGetStreamPriorityRange() -> tuple[cudaError_t, int, int]:
    return _SUCCESS, 0, -5


def cudaStreamCreateWithPriority(flags: int, priority: int) -> tuple[cudaError_t, Stream]:
    return _SUCCESS, Stream()


def cudaStreamBeginCapture(stream: Stream, mode: cudaStreamCaptureMode) -> tuple[cudaError_t]:
    if stream.before_capture is not None:
        return INVALID[:1]
    stream.before_capture, stream.work = stream.work, []
    return _OK


def cudaStreamEndCapture(stream: Stream) -> tuple[cudaError_t, Graph | None]:
    if stream.before_capture is None:
        return INVALID
    graph = Graph(stream.work)
    stream.work, stream.before_capture = stream.before_capture, None
    return _SUCCESS, graph


def cudaGraphInstantiate(graph: Graph, flags: int) -> tuple[cudaError_t, Graph]:
    return _SUCCESS, Graph(list(graph.work))


def cudaGraphLaunch(graph: Graph, stream: Stream) -> tuple[cudaError_t]:
    if stream.device != _current_device():
        return (cudaError_t.cudaErrorInvalidResourceHandle,)
    launches.append(graph)
    stream.work.extend(graph.work)
    return _OK


def cudaGraphDestroy(graph: Graph) -> tuple[cudaError_t]:
    return _OK


def cudaGraphExecDestroy(graph: Graph) -> tuple[cudaError_t]:
    return _OK


# ---- contexts -------------------------------------------------------------------------------------

#: What makes no context, and works without one.
_WITHOUT_CONTEXT = {
    "cudaGetDeviceCount", "cudaGetDevice", "cudaGetDeviceProperties", "cudaDeviceGetAttribute", "cudaGetErrorString",
    "cudaGetLastError", "cudaStream_t",
}  # fmt: skip


def _in_context(function: Any) -> Any:
    """Return `function`, which makes a context of the device that is the current one after it, and fails where the
    device is lost."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        found = (_lost[0],) if _lost else function(*arguments)
        if _lost:  # by what was computed meanwhile
            found = (_lost[0], *found[1:])
        contexts.add(_current_device())
        return found

    return call


for _name, _function in list(globals().items()):
    if _name.startswith("cuda") and type(_function) is type(_in_context) and _name not in _WITHOUT_CONTEXT:
        globals()[_name] = _in_context(_function)

"""All calls to CUDA: memory of devices, also of other processes, copies, streams and events.

Only workers and helpers call them. The kernel makes no CUDA context, so a fault in a driver can end a worker but never
the kernel. Importing this module loads nothing; `cuda()` loads cuda-bindings, and says what is missing.

Facts about handles: they come from `cudaMalloc` in another process, name the whole allocation, and are opened once for
each process and device. What is copied is complete when the function returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shm.tensor import Buffer

#: The bytes of a `cudaIpcMemHandle_t`.
HANDLE_BYTE_SIZE = 64

#: Names the package with `runtime` and `driver` that takes the place of `cuda.bindings`, for tests without a GPU.
BINDINGS_VARIABLE = "NAIAD_CUDA_BINDINGS"
#: What the driver opens: on servers and desktops, in WSL, on Tegra.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")
_BINDINGS = "cuda.bindings"

#: How errors of a region begin, where the kernel tells clients apart what Triton does.
UNAVAILABLE, TOO_SMALL = "no GPU can be used: ", "the CUDA allocation has only "

#: Errors after which the process can use no device any more: the context is lost (CUDA runtime API, cudaError_t).
STICKY_ERRORS = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})

#: The same for a context that is gone: it was destroyed (709), or the server of MPS that has it (805 to 807).
GONE_ERRORS = frozenset({709, 805, 806, 807})

#: Errors of a driver that is still starting: no initialisation yet, devices busy, system not ready (an NVSwitch).
PASSING_ERRORS = frozenset({3, 46, 802})

#: cudaErrorNotReady: what is asked for is not done yet.
_NOT_READY = 600

#: What usually is the reason for an error when a handle is opened.
_OPENING = {
    1: "it is no handle of a live allocation, or the GPU is not visible in both containers",
    101: "there is no such device",
    201: "the exporting process is this one, or in another PID namespace (containers need a shared one)",
    400: "the exporting process has freed the memory, or has ended",
}


class CudaUnavailable(Exception):
    """There is no GPU to use; the message says what is missing."""

    def __init__(self, text: str, code: int = 0) -> None:
        """`code` is the driver's error (cudaError_t); 0 for none."""
        super().__init__(text)
        #: Whether it may be another answer in a while: the driver is starting.
        self.is_passing = code in PASSING_ERRORS


class CudaError(Exception):
    """A call has failed."""

    def __init__(self, call: str, name: str, code: int) -> None:
        super().__init__(f"{call} failed: {name} ({code})")
        self.call = call
        self.code = code

    @property
    def is_sticky(self) -> bool:
        """Whether this process cannot use the device any more."""
        return self.code in STICKY_ERRORS or self.code in GONE_ERRORS

    @property
    def is_passing(self) -> bool:
        """Whether the call may succeed in a while: the driver is starting."""
        return self.code in PASSING_ERRORS

    @property
    def reason(self) -> str:
        """The usual reason where a handle was opened; empty if there is none."""
        return _OPENING.get(self.code, "") if self.call == "cudaIpcOpenMemHandle" else ""


class DeviceMemory(msgspec.Struct, frozen=True):
    """Memory of another process that is open in this one."""

    address: int
    #: From `address` to the end of the allocation.
    byte_size: int
    device_id: int


class DeviceProperties(msgspec.Struct, frozen=True):
    """What is known of a device."""

    name: str
    #: As NVML and CUDA_VISIBLE_DEVICES write it: `GPU-` and five groups of hexadecimal digits.
    uuid: str
    #: Compute capability, such as (9, 0).
    capability: tuple[int, int]
    byte_size: int


class Cuda:
    """The devices of this process. Any thread may call; a device is chosen for each call."""

    def __init__(self, runtime: Any, driver: Any) -> None:
        """The modules are cuda-bindings', or others with the same functions. Raises `CudaUnavailable`."""
        self._runtime = runtime
        self._driver = driver
        self._streams = threading.local()
        code, count = runtime.cudaGetDeviceCount()
        if int(code) or not count:
            raise CudaUnavailable(_no_device(int(code)), int(code))
        #: Devices are 0 to `device_count` - 1.
        self.device_count: int = count
        #: Whether threads keep their current device when memory of another one is opened, closed, read or freed: models
        #: and libraries rely on it. Not where nothing is computed: to go back to a device would make a context of it.
        self.keeps_current = False

    # ---- memory of other processes ---------------------------------------------------------------

    def open_handle(self, raw: bytes, device_id: int) -> DeviceMemory:
        """Open the memory of a handle; `close_handle` follows. Raises `CudaError`, ValueError for a wrong size."""
        if len(raw) != HANDLE_BYTE_SIZE:
            raise ValueError(f"a handle of {len(raw)} bytes, expected {HANDLE_BYTE_SIZE}")
        runtime = self._runtime
        handle = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(int(handle.getPtr()), raw, HANDLE_BYTE_SIZE)
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        with self.on(device_id):
            address = int(self._call("cudaIpcOpenMemHandle", handle, flags))
            try:
                base, byte_size = self._checked("cuMemGetAddressRange", self._driver.cuMemGetAddressRange(address))
            except CudaError:
                self.close_handle(DeviceMemory(address, 0, device_id))
                raise
        return DeviceMemory(address, int(byte_size) - (address - int(base)), device_id)

    def close_handle(self, memory: DeviceMemory) -> None:
        """Close what `open_handle` has returned. Raises `CudaError`."""
        with self.on(memory.device_id):
            self._call("cudaIpcCloseMemHandle", memory.address)

    # ---- copies ----------------------------------------------------------------------------------

    def copy_to_host(self, memory: DeviceMemory, offset: int, target: memoryview) -> None:
        """Fill `target`, which is writable, with the bytes at `offset` of `memory`. Raises `CudaError`."""
        if len(target):
            from shm.arrays import address_of  # of numpy, which the kernel does not import

            kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
            self._copy(memory, address_of(target), memory.address + offset, len(target), kind)

    def copy_from_host(self, memory: DeviceMemory, offset: int, source: Buffer) -> None:
        """Write `source` at `offset` of `memory`. Raises `CudaError`."""
        if len(source):
            from shm.arrays import address_of  # as above

            kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            self._copy(memory, memory.address + offset, address_of(source), len(source), kind)

    def _copy(self, memory: DeviceMemory, target: int, source: int, byte_size: int, kind: Any) -> None:
        with self.on(memory.device_id):
            stream = self._stream(memory.device_id)
            self._call("cudaMemcpyAsync", target, source, byte_size, kind, stream)
            self._call("cudaStreamSynchronize", stream)

    def _stream(self, device_id: int) -> Any:
        """Return a stream of this thread, so that its copies do not wait for other threads or for the model."""
        streams: dict[int, Any] = self._streams.__dict__.setdefault("by_device", {})
        if device_id not in streams:
            streams[device_id] = self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)
        return streams[device_id]

    # ---- what is enqueued on a stream ---------------------------------------------------------------

    def new_stream(self, device_id: int) -> Any:
        """Return a stream that waits for no other one. It lives as long as the process. Raises `CudaError`."""
        with self.on(device_id):
            return self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)

    def new_event(self, device_id: int) -> Any:
        """Return an event; waiting for it does not use the processor. Raises `CudaError`."""
        runtime = self._runtime
        flags = runtime.cudaEventBlockingSync | runtime.cudaEventDisableTiming
        with self.on(device_id):
            return self._call("cudaEventCreateWithFlags", flags)

    def new_timed_event(self, device_id: int) -> Any:
        """As `new_event`; the device notes when it is reached, for `elapsed_ns`. Raises `CudaError`."""
        with self.on(device_id):
            return self._call("cudaEventCreateWithFlags", self._runtime.cudaEventBlockingSync)

    def destroy(self, streams: Iterable[Any], events: Iterable[Any]) -> None:
        """Free streams and events that nothing uses any more. Raises `CudaError`."""
        for event in events:
            self._call("cudaEventDestroy", event)
        for stream in streams:
            self._call("cudaStreamDestroy", stream)

    def record(self, event: Any, stream: Any) -> None:
        """Let `event` be reached when all that is on `stream` now is done. Raises `CudaError`."""
        self._call("cudaEventRecord", event, stream)

    def wait_for(self, event: Any) -> None:
        """Wait until a recorded event is reached, with a processor that is free for others. Raises `CudaError`."""
        self._call("cudaEventSynchronize", event)

    def elapsed_ns(self, first: Any, second: Any) -> int:
        """Return the time between two timed events, which were reached, to half a microsecond. Raises `CudaError`."""
        return int(self._call("cudaEventElapsedTime", first, second) * 1e6)

    def enqueue_copy(self, target: int, source: int, byte_size: int, stream: Any) -> None:
        """Copy between any two addresses, of the host or of devices, when it is the stream's turn.

        Both must stay until then. Raises `CudaError`.
        """
        if byte_size:
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
            self._call("cudaMemcpyAsync", target, source, byte_size, kind, stream)

    def wait(self, stream: Any, event: Any, poll_ns: int = 0) -> None:
        """Wait until all that is enqueued on `stream` is done. Raises `CudaError`.

        For the first `poll_ns` nanoseconds it asks again and again; then it sleeps until the device wakes it.
        """
        self._call("cudaEventRecord", event, stream)
        if poll_ns:
            end_ns = time.monotonic_ns() + poll_ns
            while time.monotonic_ns() < end_ns:
                (code,) = self._runtime.cudaEventQuery(event)
                if int(code) != _NOT_READY:
                    self._checked("cudaEventQuery", (code,))
                    return
        self._call("cudaEventSynchronize", event)

    def order(self, first: Any, event: Any, second: Any) -> None:
        """Let work that is enqueued on `second` from now on wait for work already on `first`. Raises `CudaError`."""
        self._call("cudaEventRecord", event, first)
        self._call("cudaStreamWaitEvent", second, event, 0)

    def stream_of(self, address: int) -> Any:
        """Return the stream at an address, as libraries give it."""
        return self._runtime.cudaStream_t(address)

    # ---- memory of this process ------------------------------------------------------------------------

    def allocate(self, byte_size: int, device_id: int) -> int:
        """Return the address of new memory of a device; `free` follows. Raises `CudaError`."""
        with self.on(device_id):
            return int(self._call("cudaMalloc", byte_size))

    def free(self, address: int, device_id: int) -> None:
        """Free what `allocate` has returned. Waits for the device. Raises `CudaError`."""
        with self.on(device_id):
            self._call("cudaFree", address)

    def allocate_pinned(self, byte_size: int) -> int:
        """Return the address of pinned memory of the host, from which devices copy directly. Raises `CudaError`."""
        return int(self._call("cudaHostAlloc", byte_size, self._runtime.cudaHostAllocPortable))

    def free_pinned(self, address: int) -> None:
        """Free what `allocate_pinned` has returned. Raises `CudaError`."""
        self._call("cudaFreeHost", address)

    def pin(self, address: int, byte_size: int) -> None:
        """Pin memory of the host that is there, whole pages of it, for copies without staging; `unpin` follows.

        It takes long: the system brings all of its pages into memory. Their mapping must not change until `unpin`. A
        device must be the current one of this thread. Raises `CudaError`.
        """
        self._call("cudaHostRegister", address, byte_size, self._runtime.cudaHostRegisterPortable)

    def unpin(self, address: int) -> None:
        """Undo `pin`. No copy from or to the memory may be enqueued. Raises `CudaError`."""
        self._call("cudaHostUnregister", address)

    def wait_for_all(self) -> None:
        """Wait for all that this process has enqueued on the current device. Raises `CudaError`."""
        self._call("cudaDeviceSynchronize")

    def export_handle(self, address: int) -> bytes:
        """Return the handle by which other processes open memory of `allocate`. Raises `CudaError`."""
        handle = self._call("cudaIpcGetMemHandle", address)
        return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTE_SIZE)

    # ---- devices -----------------------------------------------------------------------------------------

    def use(self, device_id: int) -> None:
        """Make a device the current one of this thread: libraries of a model begin with it. Raises `CudaError`."""
        self._use(device_id)

    def enter(self, device_id: int) -> None:
        """Make a device the current one of this thread, unless the thread works with another one: that has a context.

        Each thread begins with device 0, and most functions of CUDA make a context of the current device, of some
        hundred megabytes, if there is none. Raises `CudaError`.
        """
        current = int(self._call("cudaGetDevice"))
        if current != device_id and not self._has_context(current):
            self._use(device_id)

    def _has_context(self, device_id: int) -> bool:
        """Whether the process has a context on a device. Makes none."""
        driver = self._driver
        device = self._checked("cuDeviceGet", driver.cuDeviceGet(device_id))
        _, active = self._checked("cuDevicePrimaryCtxGetState", driver.cuDevicePrimaryCtxGetState(device))
        return bool(active)

    def free_and_total(self, device_id: int) -> tuple[int, int]:
        """Return the free bytes and all bytes of a device. Raises `CudaError`."""
        self._use(device_id)
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def properties(self, device_id: int) -> DeviceProperties:
        """Return what is known of a device. Raises `CudaError`."""
        found = self._call("cudaGetDeviceProperties", device_id)
        name = found.name.decode() if isinstance(found.name, bytes) else str(found.name)
        text = str(uuid.UUID(bytes=bytes(found.uuid.bytes)[:16]))
        return DeviceProperties(
            name.rstrip("\0"), f"GPU-{text}", (int(found.major), int(found.minor)), int(found.totalGlobalMem)
        )

    # ---- graphs, priorities ------------------------------------------------------------------------------

    def new_stream_of_priority(self, device_id: int, *, high: bool) -> Any:
        """Return a stream as `new_stream`, whose work goes before or after the work of others. Raises `CudaError`."""
        self._use(device_id)
        lowest, highest = self._call("cudaDeviceGetStreamPriorityRange")
        priority = highest if high else lowest
        return self._call("cudaStreamCreateWithPriority", self._runtime.cudaStreamNonBlocking, priority)

    def enqueue_fill(self, address: int, byte_size: int, stream: Any) -> None:
        """Fill memory of a device with zeros when it is the stream's turn. Raises `CudaError`."""
        if byte_size:
            self._call("cudaMemsetAsync", address, 0, byte_size, stream)

    def begin_capture(self, stream: Any) -> None:
        """From now on, record what this thread enqueues on `stream` in a graph, without executing it.

        Raises `CudaError`.
        """
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: Any) -> Any:
        """Return the recorded graph, for `launch_graph`. Raises `CudaError`."""
        graph = self._call("cudaStreamEndCapture", stream)
        try:
            return self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)

    def launch_graph(self, graph: Any, stream: Any) -> None:
        """Enqueue all of a graph in one call. Raises `CudaError`."""
        self._call("cudaGraphLaunch", graph, stream)

    def destroy_graph(self, graph: Any) -> None:
        """Free what `end_capture` has returned. Raises `CudaError`."""
        self._call("cudaGraphExecDestroy", graph)

    # ---- calls -----------------------------------------------------------------------------------

    def _use(self, device_id: int) -> None:
        self._call("cudaSetDevice", device_id)

    @contextlib.contextmanager
    def on(self, device_id: int) -> Iterator[None]:
        """Make a device the current one of this thread for a `with` block (`keeps_current`).

        It stays the current one if there is no context on the one before: since CUDA 12, to go back would make one.
        """
        before = self._call("cudaGetDevice") if self.keeps_current else device_id
        self._use(device_id)
        try:
            yield
        finally:
            if before != device_id and self._has_context(before):
                self._use(before)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._checked(name, getattr(self._runtime, name)(*arguments))

    def _checked(self, name: str, result: tuple[Any, ...]) -> Any:
        """Return the values after the error code: none, one, or a tuple. Raises `CudaError`."""
        code, *values = result
        if int(code):
            if hasattr(self._runtime, "cudaGetLastError"):
                self._runtime.cudaGetLastError()  # an error that is not sticky must not come back from the next call
            raise CudaError(name, getattr(code, "name", "unknown error"), int(code))
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)


def is_installed() -> bool:
    """Whether cuda-bindings can be imported. Does not import it."""
    try:
        return importlib.util.find_spec(_package()) is not None
    except ModuleNotFoundError:  # the package `cuda` is not there
        return False


def has_driver() -> bool:
    """Whether this machine may have a GPU: the device file of the driver exists. If False, there is no GPU."""
    return _package() != _BINDINGS or any(map(os.path.exists, _DEVICE_FILES))


@functools.cache
def cuda() -> Cuda:
    """Return the devices of this process. Raises `CudaUnavailable`, which says what is missing."""
    package = _package()
    try:
        runtime = importlib.import_module(f"{package}.runtime")
        driver = importlib.import_module(f"{package}.driver")
    except ImportError as error:
        how = "pip install '.[gpu]' (in a checkout of Naiad)"
        raise CudaUnavailable(f"cuda-bindings is not installed: {how} ({error})") from None
    return Cuda(runtime, driver)


def _package() -> str:
    return os.environ.get(BINDINGS_VARIABLE) or _BINDINGS


def _no_device(code: int) -> str:
    not_visible = "no GPU is visible (CUDA_VISIBLE_DEVICES?)"
    too_old = (
        "the NVIDIA driver is not installed, or too old: cuda-bindings 13 (extra gpu) needs R580 or newer, "
        "cuda-bindings 12 (extra gpu-cuda12) R525 or newer"
    )
    return {0: not_visible, 35: too_old, 100: not_visible}.get(code, f"the NVIDIA driver reports error {code}")

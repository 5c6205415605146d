"""What a helper does: it decodes and encodes large messages, and copies to and from memory of clients.

`TaskRunner` runs the tasks of front doors. A task function is a generator (`kernel.serving.helper_tasks`). While it
waits for memory, the helper handles other messages. A helper has low priority, so that models, the kernel and clients
of this machine run first, and a limit for its private memory.

`RegionIo` reads and writes spans of client regions, because the kernel never accesses client memory. It uses pread and
pwrite: a region that its owner has shortened causes an error, not a signal. Memory of CUDA devices is copied.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from backends.transport import wire
from backends.transport.framing import FrameTooLarge
from kernel.errors import InternalError, InvalidArgument, NoMemory, ServingError, failing_as
from shm.arena import INLINE_LIMIT
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.worker.memory import AttachedRegion, AttachedRegions, CopyingRegion
    from backends.worker.output_memory import OutputMemory
    from kernel.serving.helper_tasks import TaskFunction, TaskResult, TaskSteps
    from shm.tensor import Buffer, Span

#: Added to the nice value of the server.
NICENESS = 10

_AUTOGROUP = Path("/proc/self/autogroup")

#: The system changes an autogroup at most once in 0.1 s for users without privileges, and says EAGAIN otherwise.
_ATTEMPTS, _PAUSE_S = 3, 0.11


def lower_priority(autogroup: Path = _AUTOGROUP) -> None:
    """Lower the priority of this process and of its session.

    Where Linux groups processes by sessions, the nice value counts only among the processes of a session. Each helper
    has a session of its own, so its group needs the value too (sched(7), "The autogroup feature").
    """
    niceness = os.nice(NICENESS)
    for attempt in range(_ATTEMPTS):
        try:
            autogroup.write_text(str(niceness))
        except BlockingIOError:
            if attempt < _ATTEMPTS - 1:
                time.sleep(_PAUSE_S)
        except OSError:
            return  # there are no such groups, or they are not ours to change
        else:
            return


logger = logging.getLogger(__name__)

#: Private memory that a helper may have, in bytes. A message that becomes more objects than this is refused: the limit
#: of a message is 64 MiB, and what is legal needs a few times that.
_MEMORY_LIMIT = 5 << 28

#: The device helper has no such limit. It decodes nothing that clients send, and a driver has needs of its own: a
#: context takes hundreds of megabytes of private memory, more with each GPU and each version of the driver, and the
#: limit also counts what is reserved and not used (mmap(2) since Linux 4.7). NVIDIA states no upper limit.
_UNLIMITED = "backends.helper.device_tasks"

#: The module of tasks that run what models bring: chat templates and tokenizers.
_TEXT_TASKS = "protocols.openai.text_tasks"

#: How much private memory such a helper may have beside what it has when it starts. The largest tokenizers take some
#: 300 MiB. RLIMIT_AS would also count the arenas that are mapped, which a template cannot make larger.
_TEXT_MEMORY = 3 << 28

#: From this size of sources on, freed memory is given back to the system after a task.
_TRIMMED_BYTE_SIZE = 4 << 20


def limit_memory(task_module: str) -> None:
    """Let allocations of a helper fail above its memory limit. Shared memory does not count (setrlimit(2))."""
    if task_module == _UNLIMITED:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_byte_size() + _TEXT_MEMORY if task_module == _TEXT_TASKS else _MEMORY_LIMIT
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _data_byte_size() -> int:
    """Return the private memory of this process as RLIMIT_DATA counts it (proc(5), `statm`)."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def next_step(steps: TaskSteps, memory: memoryview | None) -> bytes | TaskResult | ServingError:
    """Run the next step of a task. Returns its message if it needs memory, its result, or its error. Never raises."""
    try:
        with failing_as(_unexpected, passes=ServingError):
            try:
                return next(steps) if memory is None else steps.send(memory)
            except StopIteration as stop:
                result: TaskResult = stop.value
                return result
            except MemoryError:
                raise NoMemory("the message needs too much memory to be decoded or encoded") from None
    except ServingError as error:
        return error.with_traceback(None)  # the traceback refers to the memory


def _unexpected(error: Exception) -> ServingError:
    logger.error("a task of a helper has failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


class TaskRunner:
    """Runs one task at a time."""

    def __init__(
        self, regions: AttachedRegions, memory: OutputMemory, send: Callable[[wire.ToKernel], None], module: str
    ) -> None:
        """`module` has the functions by name, as `TASKS`. A helper's process has imported it before it is ready."""
        self._regions = regions
        self._memory = memory
        self._send = send
        self._module = module
        self._functions: Mapping[str, TaskFunction] | None = None
        #: The task that waits for memory.
        self._number = 0
        self._steps: TaskSteps | None = None
        self._trims = False

    def run(self, message: wire.RunTask) -> None:
        """Start a task."""
        assert self._steps is None, "a task is running"
        if self._functions is None:
            self._functions = importlib.import_module(self._module).TASKS
        self._number = message.task
        self._trims = sum(source.byte_size for source in message.sources) >= _TRIMMED_BYTE_SIZE
        self._steps = self._functions[message.name](message.arguments, list(map(self._bytes, message.sources)))
        self._step(None)

    def memory(self, message: wire.TaskMemory) -> None:
        """Go on with the task that waits for memory, or drop it if there is none."""
        assert message.task == self._number, f"memory for task {message.task}, while {self._number} runs"
        if message.span is None:
            self._end()
        else:
            self._step(self._view(message.span))

    def _step(self, memory: memoryview | None) -> None:
        steps, number = self._steps, self._number
        assert steps is not None, "no task is running"
        response: wire.ToKernel
        found = next_step(steps, memory)
        if isinstance(found, bytes):
            response = wire.TaskNeedsMemory(number, found)
        else:
            self._end()
            response = _failed(number, found) if isinstance(found, ServingError) else self._done(number, found)
        try:
            self._send(response)
        except FrameTooLarge as error:
            self._refuse(response, error)

    def _refuse(self, response: wire.ToKernel, reason: FrameTooLarge) -> None:
        """End the task whose `response` is too large to be sent; nothing of it was."""
        self._end()
        if isinstance(response, wire.TaskDone) and response.output is not None and response.output.span is not None:
            self._memory.drop(response.output.span)
        error = InvalidArgument(f"what the helper has found out of the message is too large: {reason}")
        self._send(_failed(self._number, error))

    def _done(self, number: int, result: TaskResult) -> wire.ToKernel:
        output = None
        if result.output:
            try:
                output = self._written(result.output)
            except ServingError as error:
                return _failed(number, error)
        return wire.TaskDone(number, result.message, output)

    def _written(self, parts: Sequence[Buffer]) -> Tensor:
        """Return the bytes of `parts` as a tensor, inline or in the helper's arena."""
        byte_size = sum(map(len, parts))
        if byte_size <= INLINE_LIMIT:
            return Tensor("", "UINT8", [byte_size], b"".join(parts))
        span, view = self._memory.take(byte_size)
        position = 0
        for part in parts:
            view[position : position + len(part)] = part
            position += len(part)
        return Tensor("", "UINT8", [byte_size], None, span)

    def _end(self) -> None:
        """Forget the task and what it has allocated."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        if self._trims:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)

    def _bytes(self, tensor: Tensor) -> memoryview:
        if tensor.data is not None:
            return memoryview(tensor.data)
        assert tensor.span is not None, "a source without bytes"
        return self._view(tensor.span).toreadonly()

    def _view(self, span: Span) -> memoryview:
        return self._regions.get(span.lease.region_number).view(span.offset, span.byte_size)


def _failed(number: int, error: ServingError) -> wire.TaskFailed:
    return wire.TaskFailed(
        number, error.code.value, error.message, error.before_queueing, no_memory=isinstance(error, NoMemory)
    )


class RegionIo:
    """Reads and writes on behalf of the kernel, one task after the other."""

    def __init__(self, regions: AttachedRegions, memory: OutputMemory, send: Callable[[wire.ToKernel], None]) -> None:
        """`read` puts the bytes into `memory`, from which the kernel takes them."""
        self._regions = regions
        self._memory = memory
        self._send = send

    def read(self, message: wire.ReadSpan) -> None:
        """Read a span and send `SpanRead`."""
        span = message.span
        try:
            place, view = self._memory.take(span.byte_size)
        except ServingError as error:
            self._send(wire.SpanRead(message.task, error_text=error.message))
            return
        try:
            self._region(span).read_into(span.offset, view)
        except ServingError as error:
            self._memory.drop(place)
            self._send(wire.SpanRead(message.task, error_text=error.message))
            return
        self._send(wire.SpanRead(message.task, Tensor("", "UINT8", [span.byte_size], None, place)))

    def write(self, message: wire.WriteSpan) -> None:
        """Write a span and send `SpanWritten`."""
        source, target = message.source, message.target
        try:
            data = self._region(source).view(source.offset, source.byte_size)
            self._region(target).write_from(target.offset, data)
        except ServingError as error:
            self._send(wire.SpanWritten(message.task, error.message))
            return
        self._send(wire.SpanWritten(message.task))

    def _region(self, span: Span) -> AttachedRegion | CopyingRegion:
        # Helpers share memory with the kernel: no region of theirs was transferred.
        return cast("AttachedRegion | CopyingRegion", self._regions.get(span.lease.region_number))

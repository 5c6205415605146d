"""A front door's process: `python -m backends.doors --model TITLE ...`, started by the kernel and ended with it.

It has one event loop, the kernel's code of its protocols, and no model. It reads and writes only the connections that
the kernel gives it, its own arenas, and memory of workers that it has got read-only.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import anyio

from backends.doors.door_end import DoorKernel
from backends.doors.messages import DoorLogged, DoorReady, DoorState
from backends.helper.tasks import next_step
from backends.process_control import (
    die_with_parent,
    end_sooner_without_memory,
    set_process_name,
    write_stacks_when_asked,
)
from backends.transport.wire import PROTOCOL
from kernel.background import BackgroundTasks
from kernel.errors import InternalError, NoMemory, RequestCancelled, ServingError
from kernel.machine import share_malloc_arena
from shm.tensor import Tensor

if TYPE_CHECKING:
    from backends.doors.messages import Configure, ProtocolOpened
    from kernel.serving.helper_tasks import HelperTask

#: The fields of a line of the access log.
_ACCESS_FIELDS = (
    "peer", "method", "path", "status", "bytes_in", "bytes_out", "duration_ms", "model", "version", "request_id",
)  # fmt: skip

_TICK_S = 1.0


class _LogSender(logging.Handler):
    """Sends the lines of this process to the kernel, which writes them as its own."""

    def __init__(self, kernel: DoorKernel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._kernel = kernel
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + (logging.Formatter().formatException(record.exc_info))
        fields = {}
        if record.name == "access":
            fields = {name: getattr(record, name, None) for name in _ACCESS_FIELDS}
        message = DoorLogged(record.name, record.levelno, text, fields)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._kernel.send, message)


class OwnHelpers:
    """Does the work of helpers in a thread of the door. A `kernel.serving.helper_tasks.FrontDoorHelpers`.

    The loop goes on meanwhile, as far as the interpreter's lock lets it: only connections of this door can be delayed.
    """

    idle, ready = False, True

    def __init__(self, module: str) -> None:
        """`module` has the functions by name, as `TASKS`."""
        self._module = module
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "tasks")
        self._runs = BackgroundTasks()

    def load(self) -> None:
        """Import the functions: a request does not wait for that."""
        importlib.import_module(self._module)

    def start_ahead(self) -> None:
        """Do nothing: the thread starts in no time."""

    def add(self, task: HelperTask) -> None:
        self._runs.start(self._run(task)).add_done_callback(partial(self._ended, task))

    def cancel(self, task: HelperTask) -> None:
        """Let it end: it takes milliseconds."""

    async def _run(self, task: HelperTask) -> None:
        loop = asyncio.get_running_loop()
        try:
            sources = [memoryview(source.raw()) for source in task.sources]
            steps = importlib.import_module(self._module).TASKS[task.name](task.arguments, sources)
            found = await loop.run_in_executor(self._thread, next_step, steps, None)
            if isinstance(found, bytes):
                span = task.needs_memory(found)
                memory = span.lease.region.view(span.offset, span.byte_size)
                found = await loop.run_in_executor(self._thread, next_step, steps, memory)
            if isinstance(found, bytes):
                raise InternalError(f"task {task.name} asks twice for memory")
            if isinstance(found, ServingError):
                raise found
            output = b"".join(found.output)
        except ServingError as error:
            task.failed(error)
        except MemoryError:
            task.failed(NoMemory("the message needs too much memory to be decoded or encoded"))
        else:
            task.done(found.message, Tensor("", "UINT8", [len(output)], output) if found.output else None)

    def _ended(self, task: HelperTask, run: asyncio.Task[None]) -> None:
        """Let the task of a cancelled or failed run fail too, so that every task ends."""
        if run.cancelled():
            task.failed(RequestCancelled())
        elif (error := run.exception()) is not None:
            task.failed(InternalError(f"{type(error).__name__}: {error}"))


class _Process:
    """The parts of the process, on its loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._helpers = OwnHelpers("protocols.helper_tasks")
        self.kernel = DoorKernel(sock, self._helpers, _end)
        self.kernel.on_configured = self._configured
        self.kernel.on_protocol = self._open
        self.kernel.on_drain = self._drain
        #: What serves the connections of a protocol, by its name.
        self._connections: dict[str, Any] = {}
        self._tasks: asyncio.TaskGroup
        self._state = DoorState({}, {}, 0)
        self._taken: dict[str, int] = {}
        self._ended = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        """Wait until the door has drained."""
        async with asyncio.TaskGroup() as self._tasks:
            await self._ended

    def _configured(self, message: Configure) -> None:
        logging.getLogger().setLevel(logging.DEBUG if message.log_verbose_level else logging.INFO)
        self.kernel.on_connection = self._adopt
        self._helpers.load()
        loop = asyncio.get_running_loop()
        loop.call_soon(self.kernel.send, DoorReady(PROTOCOL))  # after the protocols that come with this message
        loop.call_later(_TICK_S, self._tick)

    def _open(self, message: ProtocolOpened) -> None:
        module = importlib.import_module(message.module)
        self._connections[message.name] = module.open_connections(self.kernel, message.settings)
        self._taken[message.name] = 0
        gc.collect()
        gc.freeze()
        gc.enable()

    def _adopt(self, protocol: str, sock: socket.socket, received: bytes, passes: int) -> None:
        self._taken[protocol] += 1
        self._tasks.create_task(self._connections[protocol].adopt(sock, received, passes))

    def _drain(self, grace_s: float) -> None:
        self._tasks.create_task(self._drained(grace_s))

    async def _drained(self, grace_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for connections in self._connections.values():
                tasks.create_task(connections.close(grace_s))
        self._send_state()
        await self.kernel.written()
        if not self._ended.done():
            self._ended.set_result(None)

    def _tick(self) -> None:
        asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        level = logging.DEBUG if self.kernel.log.values.log_verbose_level else logging.INFO
        logging.getLogger().setLevel(level)
        self.kernel.return_memory()
        self.kernel.close_unused_arenas()
        self._send_state()

    def _send_state(self) -> None:
        connections = {name: each.connection_count for name, each in self._connections.items()}
        state = DoorState(connections, dict(self._taken), self.kernel.memory_refusals.count)
        if state != self._state:
            self._state = state
            self.kernel.send(state)


def _end(problem: str | None) -> NoReturn:
    """The kernel is gone, or `problem` is why it cannot be understood: end at once, with all connections."""
    if problem is None:
        os._exit(0)
    with contextlib.suppress(OSError):
        os.write(2, f"the connection to the kernel is ended: {problem}\n".encode(errors="replace"))
    os._exit(1)


async def _serve(sock: socket.socket) -> None:
    process = _Process(sock)
    root = logging.getLogger()
    root.handlers[:] = [_LogSender(process.kernel, asyncio.get_running_loop())]
    root.setLevel(logging.INFO)
    # The process ends with such an error: what is sent to the kernel would be lost.
    failures = logging.getLogger("backends.transport.channel")
    failures.addHandler(logging.StreamHandler())
    failures.propagate = False
    await process.wait()


def main() -> None:
    """Be a front door until the kernel ends it."""
    parser = argparse.ArgumentParser(description="A front door's process; started by the server, not by hand.")
    parser.add_argument("--model", required=True, help="name of the door, shown in process lists")
    parser.add_argument("--fd", type=int, required=True, help="the door's end of the Unix socket to the kernel")
    parser.add_argument("--kernel", type=int, required=True, help="process id of the kernel")
    parser.add_argument("--event-loop", choices=("uvloop", "asyncio"), default="uvloop", help="the event loop")
    arguments = parser.parse_args()
    gc.disable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the kernel drains, and ends its doors
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(arguments.kernel)
    end_sooner_without_memory()
    write_stacks_when_asked()
    set_process_name(arguments.model)
    share_malloc_arena()
    sock = socket.socket(fileno=arguments.fd)
    anyio.run(_serve, sock, backend="asyncio", backend_options={"use_uvloop": arguments.event_loop == "uvloop"})


main()

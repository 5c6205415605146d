"""The kernel's side of the processes that read clouds: starts them, sends requests, and ends those that hang."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.machine import own_command
from kernel.repository.clouds.messages import IDLE_S, MAX_MESSAGE_BYTE_SIZE, Failed, Part, Received, Response, Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.repository.clouds.messages import Request

#: Seconds without any sign of a process after which it is ended. The clients give up earlier and say why.
SILENCE_LIMIT_S = 60.0

#: Requests at the same time that are no downloads. These take long; who sends them limits them.
_READS_AT_ONCE = 2

#: Seconds within which a killed process is expected to end.
_END_S = 5.0

_MODULE = "kernel.repository.clouds.process"
_LENGTH = struct.Struct("!I")
#: Longer values are decoded in a thread.
_LONG_BYTE_SIZE = 64 << 10


class CloudFailed(Exception):
    """A store, or the process that reads it, has failed. The message is for operators."""


class StoreFailed(CloudFailed):
    """A store has refused a request, or its response is not what was expected. It may have changed."""


class Ended(Exception):
    """The process has ended before it responded."""


class CloudReader(Protocol):
    """What asks stores. The implementation below does it in other processes; tests have one of their own."""

    async def ask(self, request: Request, kind: Any, progress: Callable[[int], None] | None = None) -> Any:
        """Return the result of a request, as the type `kind`.

        A request with `progress` is a download; it gets how many bytes have arrived. Raises `CloudFailed`. If the
        caller is cancelled, the request ends.
        """

    async def close(self) -> None:
        """End what runs."""


class StoreProcess:
    """One process. It has one request at a time."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        with other:
            try:
                # A session of its own: only the kernel gets signals of the terminal.
                self.process = subprocess.Popen(
                    own_command(_MODULE), stdin=other.fileno(), stdout=other.fileno(), start_new_session=True
                )
            except BaseException:
                own.close()
                raise
        own.setblocking(False)
        self.socket = own
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, content: bytes, progress: Callable[[int], None]) -> tuple[list[Part | Result], Failed | None]:
        """Send a request, and return the parts of its result, or what has failed. Raises `CloudFailed`, `Ended`."""
        if self.streams is None:
            self.streams = await asyncio.open_unix_connection(sock=self.socket)
        reader, writer = self.streams
        parts: list[Part | Result] = []
        try:
            writer.write(_LENGTH.pack(len(content)) + content)
            async with asyncio.timeout(SILENCE_LIMIT_S):
                await writer.drain()
            while True:
                async with asyncio.timeout(SILENCE_LIMIT_S):
                    [byte_size] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                    if byte_size > MAX_MESSAGE_BYTE_SIZE:
                        raise CloudFailed(f"the response has {byte_size} bytes, at most {MAX_MESSAGE_BYTE_SIZE}")
                    message = await reader.readexactly(byte_size)
                response = msgspec.msgpack.decode(message, type=Response)
                if isinstance(response, Received):
                    progress(response.count)
                elif isinstance(response, Failed):
                    return [], response
                else:
                    parts.append(response)
                    if isinstance(response, Result):
                        return parts, None
        except TimeoutError:
            raise CloudFailed(f"nothing arrived for {SILENCE_LIMIT_S:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Ended from None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Kill the process. It ends within milliseconds, unless the system cannot end it; `alive` tells."""
        if self.streams is not None:
            self.streams[1].close()
        else:
            self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def wait(self) -> None:
        """Wait a few seconds for the end of the process. Blocks."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)


class ReaderProcesses:
    """Implements `CloudReader`. Processes start when they are needed, and end when they are idle for a minute."""

    def __init__(self) -> None:
        #: The last one is used first, so that the others can end.
        self._idle: list[StoreProcess] = []
        self._timer: asyncio.TimerHandle | None = None
        #: Killed, and not waited for yet.
        self._ended: list[StoreProcess] = []
        self._busy: set[StoreProcess] = set()
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)
        self._closed = False

    async def ask(self, request: Request, kind: Any, progress: Callable[[int], None] | None = None) -> Any:
        content = msgspec.msgpack.encode(request)
        async with self._reads if progress is None else contextlib.nullcontext():
            while self._idle:
                with contextlib.suppress(Ended):  # it was idle for too long, and has ended
                    return await self._ask(self._idle.pop(), content, kind, progress)
            if self._closed:  # which has ended the process of this request
                raise CloudFailed("the server stops")
            try:
                return await self._ask(StoreProcess(), content, kind, progress)
            except OSError as error:
                raise CloudFailed(f"the process that reads clouds cannot start: {error}") from error
            except Ended:
                raise CloudFailed("the process that reads clouds has ended unexpectedly") from None

    async def _ask(
        self, process: StoreProcess, content: bytes, kind: Any, progress: Callable[[int], None] | None
    ) -> Any:
        self._busy.add(process)
        try:
            parts, failed = await process.ask(content, progress or _ignore)
            value = None if failed is not None else await decoded_value(parts, kind)
        except BaseException:
            self._end(process)
            raise
        finally:
            self._busy.discard(process)
        if failed is not None and progress is not None:
            self._end(process)  # the other files of the download may still arrive
        else:
            self._idle.append(process)
            self._look_later()
        if failed is not None:
            raise StoreFailed(failed.message)
        return value

    def _end(self, process: StoreProcess) -> None:
        process.end()
        self._ended.append(process)
        self._look_later()

    def _look_later(self) -> None:
        """Wait for processes that were killed, and forget those that have ended because they were idle."""
        if self._timer is not None:
            self._timer.cancel()
        if self._closed:
            return
        delay_s = _END_S if self._ended else IDLE_S + _END_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._forget_ended)

    def _forget_ended(self) -> None:
        self._timer = None
        for process in [process for process in self._idle if not process.alive]:
            self._idle.remove(process)
            process.end()
        self._ended = [process for process in self._ended if process.alive]
        if self._ended or self._idle:
            self._look_later()

    async def close(self) -> None:
        """See `CloudReader`. Requests that run or follow fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        processes, self._idle = [*self._idle, *self._busy, *self._ended], []
        for process in processes:
            process.end()
        await asyncio.gather(*(asyncio.to_thread(process.wait) for process in processes))


async def decoded_value(parts: list[Part | Result], kind: Any) -> Any:
    """Return the value of a result as the type `kind`."""
    values = [
        await asyncio.to_thread(_decoded, part, kind) if len(memoryview(part.value)) > _LONG_BYTE_SIZE
        else _decoded(part, kind)
        for part in parts
    ]  # fmt: skip
    return values[0] if len(values) == 1 else list(chain.from_iterable(values))


def _decoded(part: Part | Result, kind: Any) -> Any:
    return msgspec.msgpack.decode(part.value, type=kind)


def _ignore(byte_size: int) -> None:
    """Nobody asks for the progress of a listing."""

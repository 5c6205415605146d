"""A relay of TCP connections that delays what passes, or holds it up, as a bad link does."""

from __future__ import annotations

import asyncio
import threading
import time

_MOST = 1 << 16


class Relay:
    """Listens on a loopback port and passes to one address, from the beginning of the `with` block to its end."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._to = host, port
        self.port = 0
        self._delay_s = 0.0
        #: Set while data passes.
        self._passes = threading.Event()
        self._passes.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Relay:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._accept, "127.0.0.1", 0), self._loop)
        self.port = server.result().sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._to)
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer), return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on all data in order, each portion `_delay_s` after it has come."""
        passed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(passed, writer))
            while data := await reader.read(_MOST):
                await passed.put((time.monotonic() + self._delay_s, data))
            await passed.put((0.0, b""))

    async def _write(self, passed: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            at_s, data = await passed.get()
            if (wait_s := at_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            while not self._passes.is_set():  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.001)
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    def delay_for(self, delay_s: float, seconds: float) -> None:
        """Delay by `delay_s` what passes in each direction. Returns after `seconds`."""
        self._delay_s = delay_s
        time.sleep(seconds)
        self._delay_s = 0.0

    def stall(self, times: int, seconds: float) -> None:
        """Let nothing pass for `seconds`, then everything for `seconds`. Repeat this `times` times."""
        for _ in range(times):
            self._passes.clear()
            time.sleep(seconds)
            self._passes.set()
            time.sleep(seconds)

"""A connection of the fast path on a transport that only remembers, and models that respond when a test says so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kernel.options import HttpOptions
from protocols.http.aiohttp_internals import AiohttpServer
from protocols.http.fast.connection import FastConnection
from protocols.http.fast.fast_path import FastPath
from protocols.http.inference.infer_call import HttpInference
from protocols.http.request_rules import make_request_rules
from protocols.http.responses import empty_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from aiohttp import web

    from kernel.serving.kernel import Kernel
    from kernel.serving.request import Request


_NO_OPTIONS = HttpOptions()


class RecordingTransport(asyncio.Transport):
    """Remembers what is written and how it is asked to read and close."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.unsent = 0
        self.reading = True
        self.closed = False
        self.aborted = False
        self.protocol: asyncio.BaseProtocol | None = None

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        self.writes.append(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol


class FastPathLab:
    """One connection of a fast path, whose clock a test moves."""

    def __init__(self, kernel: Kernel, options: HttpOptions, *, log_access: bool) -> None:
        self.kernel = kernel
        rules = make_request_rules(options)
        self.fast_path = FastPath(HttpInference(kernel, 1 << 20), rules, log_access=log_access)
        self.fast_path.inference.messages = None  # no test depends on how long something takes
        self.fast_path.aiohttp_server = AiohttpServer(self._aiohttp_response)
        #: Requests of the model `stuck`, to which a test responds.
        self.waiting: list[Request] = []
        model = kernel.resolve("stuck")
        submit = model.submit

        def submit_and_note(request: Request) -> None:
            self.waiting.append(request)
            submit(request)

        model.submit = submit_and_note  # type: ignore[method-assign]
        #: Further connections.
        self.others: list[FastConnection] = []
        self.transport = RecordingTransport()
        self.connection = FastConnection(self.fast_path)
        self.connection.connection_made(self.transport)
        assert self.fast_path.timer is not None
        self.fast_path.timer.cancel()  # the test moves the clock
        # It begins at a whole number of seconds, so that sums of seconds are exact.
        self.fast_path.set_clock(1000.0)
        self.connection._active_s = 1000.0

    def another_connection(self) -> tuple[FastConnection, RecordingTransport]:
        connection, transport = FastConnection(self.fast_path), RecordingTransport()
        connection.connection_made(transport)
        self.others.append(connection)
        return connection, transport

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and the connections see it."""
        self.fast_path.expire(self.fast_path.now_s + seconds)

    async def _aiohttp_response(self, http: web.BaseRequest) -> web.StreamResponse:
        return empty_response()


@pytest.fixture
def with_fast_path(with_kernel: Callable[[Callable[[Kernel], Awaitable[None]]], None]) -> Callable[..., None]:
    """Return a function that runs a coroutine function with a `FastPathLab` of the given options."""

    def run(
        test: Callable[[FastPathLab], Awaitable[None]],
        options: HttpOptions = _NO_OPTIONS,
        *,
        log_access: bool = False,
    ) -> None:
        async def inner(kernel: Kernel) -> None:
            lab = FastPathLab(kernel, options, log_access=log_access)
            try:
                await test(lab)
            finally:
                for connection in (lab.connection, *lab.others):
                    connection.connection_lost(None)

        with_kernel(inner)

    return run

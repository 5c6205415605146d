"""A server without front doors for commands that need workers: they examine or try models, and end.

The command's work runs on the server's event loop when the server is ready. It has the kernel, to submit requests, and
the lifecycle, to load models.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
import msgspec

from kernel.errors import BadOption
from kernel.operator import ServerOperator, stop_signals
from kernel.options import ListenAddress, RepositoryOptions, ServerOptions
from kernel.repository.lifecycle import Lifecycle
from kernel.start import start

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from kernel.serving.kernel import Kernel
    from kernel.settings import LogSettings

_Result = TypeVar("_Result")

_CLOSED = ListenAddress(allow=False, address="", port=0)


class ToolServer(msgspec.Struct, frozen=True, eq=False):
    """What the work of a command gets: the parts of a running server."""

    kernel: Kernel
    lifecycle: Lifecycle


def run_tool(
    repositories: Sequence[Path],
    work: Callable[[ToolServer], Awaitable[_Result]],
    *,
    verbose: bool = False,
) -> _Result:
    """Run `work` in a server of `repositories` that has loaded no model, and return its result.

    With `verbose` the log goes to standard error: lines of the server, and what models print. Raises `BadOption` if the
    server cannot start, and `KeyboardInterrupt` if a signal has ended it.
    """
    operator = ToolOperator(work, verbose=verbose)
    start(_options(repositories), operator=operator)
    return operator.take_result()


def _options(repositories: Sequence[Path]) -> ServerOptions:
    for path in repositories:
        if not path.is_dir():
            raise BadOption(f"model repository '{path}' is not a folder")
    return ServerOptions(
        RepositoryOptions(paths=tuple(repositories), control_mode="explicit"),
        http_listener=_CLOSED,
        grpc_listener=_CLOSED,
        metrics_listener=_CLOSED,
        busy_poll_us=0,
        exit_timeout_s=1,
    )


class ToolOperator(ServerOperator, Generic[_Result]):
    """Runs the work of a command as soon as the server is ready, and stops it then."""

    def __init__(self, work: Callable[[ToolServer], Awaitable[_Result]], *, verbose: bool) -> None:
        self._work = work
        self._verbose = verbose
        #: One element as soon as the work is done.
        self._results: list[_Result] = []
        self._failure = ""
        self._opened: asyncio.Event
        self._kernel: Kernel

    def take_result(self) -> _Result:
        """Return the result of the work. Raises `BadOption` or `KeyboardInterrupt` if there is none."""
        if self._failure:
            raise BadOption(self._failure)
        if not self._results:
            raise KeyboardInterrupt
        return self._results[0]

    # ---- ServerOperator ----------------------------------------------------------------------

    def begin(self, log: LogSettings) -> None:
        """Show the log or drop it: the command itself says what it has found."""
        self._opened = asyncio.Event()
        root = logging.getLogger()
        root.handlers.clear()
        root.addHandler(logging.StreamHandler(sys.stderr) if self._verbose else logging.NullHandler())
        root.setLevel(logging.INFO)
        logging.captureWarnings(True)

    def imported(self) -> None:
        gc.enable()

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        """Do the work, unless a signal comes first; then stop the server."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_on_signal, tasks.cancel_scope)
            await self._opened.wait()
            lifecycle = self._kernel.repository
            assert isinstance(lifecycle, Lifecycle), "the server has no repositories"
            self._results.append(await self._work(ToolServer(self._kernel, lifecycle)))
            tasks.cancel_scope.cancel()
        stop.set()

    async def _cancel_on_signal(self, scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(*stop_signals()) as received:
            async for _ in received:
                scope.cancel()

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        self._kernel = kernel
        self._opened.set()

    def failed(self, reason: str) -> None:
        self._failure = reason

    def end(self) -> None:
        """Write what models have printed last."""
        with contextlib.suppress(OSError):
            sys.stderr.flush()

"""`ServerOperator`: what a server tells the code that started it, and asks of it.

`kernel.tools.terminal.Terminal` is for the command line, `kernel.tools.tool_server.ToolOperator` for commands
that need workers but no front doors, `kernel.embedding.server.ServerThread` for a Python program that embeds the
server. Signals, the format of the log and the garbage collector belong to the process, so only an operator may change
them.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from kernel.repository.load_progress import LoadStep
    from kernel.serving.catalog import Catalog
    from kernel.serving.kernel import Kernel
    from kernel.settings import LogSettings


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a server of the command line after it has answered what it has accepted.

    SIGHUP comes when a terminal is closed; without a handler the process would end at once and lose its requests. It is
    not among them where it was ignored when the process began, as `nohup` has it.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,)))


class ServerOperator:
    """Starts and stops a server, and gets its news. The server calls the methods on its event loop, in this order.

    What a subclass does not need does nothing.
    """

    #: Whether the process is the server's alone, and the server's loop runs in its main thread.
    owns_process = True

    def begin(self, log: LogSettings) -> None:
        """Prepare the process; no part of the server exists yet. May raise `BadOption`."""

    def imported(self) -> None:
        """All modules are imported that every server needs. Not called if the start fails before."""

    def lost_log_lines(self) -> int:
        """Return how many lines of the log were lost since the start; 0 if the program owns the log."""
        return 0

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        """Set `stop` when the server should stop. Runs until it returns or is cancelled."""

    def models_loading(self, step: LoadStep) -> None:
        """The models of the start load; called several times a second, if that takes long."""

    def models_loaded(self, catalog: Catalog) -> None:
        """All loads at the start have ended, with or without success."""

    def model_retired(self) -> None:
        """The workers of a version have ended that was unloaded or replaced."""

    def advice(self, catalog: Catalog, failed: Sequence[str]) -> str:
        """Return a hint for the error of a server that does not start because the models `failed` did not load."""
        return ""

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        """Every front door listens. `ports` has the ports of the open ones: `http`, `grpc`, `metrics`."""

    # Called where the process is the server's alone.

    def failed(self, reason: str) -> None:
        """Say why the server cannot start."""

    def end(self) -> None:
        """The server has ended, or could not start. Called last, once."""

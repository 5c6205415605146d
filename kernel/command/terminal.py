"""Whose server it is: what a server asks of whoever started it, and what it does for a person at a terminal.

The other owner is a Python program, `kernel/embedding/server_thread.py`. Signals, the log's format and the garbage
collector belong to the process, and so to the owner of the process: only `Terminal` touches them.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Protocol

import anyio

from kernel.command.start_messages import print_backends_table, print_demo_hint, print_models_table, print_options_table
from kernel.observe.logs import set_up_logging

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from kernel.options import ServerOptions
    from kernel.serving.catalog import Catalog
    from kernel.serving.kernel import Kernel
    from kernel.settings import LogSettings

logger = logging.getLogger(__name__)

#: Signals within this time of the first are the same wish to stop, not a second one.
_SAME_SIGNAL_S = 1.0


class ServerOperator(Protocol):
    """Whoever started a server. Called from the server's loop, in the order of the methods."""

    def begin(self, log: LogSettings) -> None:
        """Nothing of the server is there yet."""

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        """Set `stop` when the server is to end; runs until it returns or is cancelled."""

    def models_loaded(self, catalog: Catalog) -> None:
        """The models of the start were loaded, or were not."""

    def advice(self, catalog: Catalog, failed: Sequence[str]) -> str:
        """Return what helps somebody whose server does not start because these models failed."""

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        """Every front door listens: `http`, `grpc`, `metrics` at these ports, as far as they are there."""


class Terminal:
    """The command line. Writes the log, shows the models, and stops the server on SIGINT and SIGTERM."""

    def __init__(self, options: ServerOptions, notes: Sequence[str], backends: Mapping[str, str]) -> None:
        """`notes` are logged as warnings; `backends` are shown, see `print_backends_table`."""
        self._options = options
        self._notes = notes
        self._backends = backends

    @property
    def _people_read(self) -> bool:
        return self._options.log.format != "json"

    def begin(self, log: LogSettings) -> None:
        """Set up the log. Raises `BadOption`."""
        set_up_logging(log)
        for note in self._notes:
            logger.warning("%s", note)

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        """Wait for a signal; a second one ends the process."""
        first_s = 0.0
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
            async for number in received:
                if stop.is_set():
                    # make and other parents pass a signal on that the terminal has sent us as well.
                    if time.monotonic() - first_s < _SAME_SIGNAL_S:
                        continue
                    logger.warning("Signal (%d) received again: exiting at once", number)
                    os._exit(1)  # workers die with their parent
                logger.info("Signal (%d) received.", number)
                first_s = time.monotonic()
                stop.set()

    def models_loaded(self, catalog: Catalog) -> None:
        """Tell what became of each model: people a table, and machines that read JSON a line for each."""
        if self._people_read:
            if not self._options.demo:  # who tries the server for the first time has enough to read
                print_backends_table(self._backends)
            print_models_table(catalog)
            if not self._options.demo:
                print_options_table(self._options)
            return
        for item in catalog.index():
            state = f"{item.state}: {item.reason.strip()}" if item.reason else item.state or "not loaded"
            logger.info("model '%s': %s", item.name, state, extra={"model": item.name, "version": item.version})

    def advice(self, catalog: Catalog, failed: Sequence[str]) -> str:
        return "see the table above; --exit-on-error=false starts without them"

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        """Say what to try, where the demo is served."""
        # What exists now lives as long as the server: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        if self._options.demo and "http" in ports and self._people_read:
            print_demo_hint(ports["http"])

"""The operator of a server that was started at the command line: log, tables of models, signals.

`LoadDisplay` shows how far the loading of the models is: as a bar on a terminal, else as a line of the log every ten
seconds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING

import anyio

from kernel.machine import give_memory_back
from kernel.observe.logs import set_up_logging
from kernel.operator import ServerOperator, stop_signals
from kernel.texts import printable
from kernel.tools.first_requests import first_requests
from kernel.tools.printing import backends_table, demo_hint, models_table, options_table, server_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kernel.observe.logs import ServerLog
    from kernel.options import ServerOptions
    from kernel.repository.load_progress import LoadStep
    from kernel.serving.catalog import Catalog
    from kernel.serving.kernel import Kernel
    from kernel.settings import LogSettings

logger = logging.getLogger(__name__)

#: A signal within this time after the first is a copy of the first, not a second one.
_SAME_SIGNAL_S = 1.0


#: How long after the end of a model's workers its objects are collected.
_COLLECTED_AFTER_S = 0.5


class Terminal(ServerOperator):
    """Writes the log, prints the models, and stops the server on `stop_signals`."""

    def __init__(self, options: ServerOptions, notes: Sequence[str], backends: Callable[[], Mapping[str, str]]) -> None:
        """`notes` are logged as warnings. `backends` returns what is printed, see `backends_table`."""
        self._options = options
        self._notes = notes
        self._backends = backends
        #: None before `begin`.
        self._log: ServerLog | None = None
        #: Set while a collection of unloaded models is due.
        self._collection: asyncio.TimerHandle | None = None
        #: None before models load.
        self._display: LoadDisplay | None = None

    @property
    def _prints_tables(self) -> bool:
        return self._options.log.format != "json"

    def begin(self, log: LogSettings) -> None:
        """Set up the log. Raises `BadOption` if the log file cannot be written."""
        self._log = set_up_logging(log)
        for note in self._notes:
            logger.warning("%s", note)

    def imported(self) -> None:
        """Enable garbage collection. Imported objects are excluded, because they live as long as the server."""
        gc.freeze()
        gc.enable()

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        """Wait for a signal; a second one ends the process, unless it is SIGHUP."""
        first_s = 0.0
        with anyio.open_signal_receiver(*stop_signals()) as received:
            async for number in received:
                if stop.is_set():
                    # `make` and other parent processes repeat the signal that the terminal has already sent. SIGHUP is
                    # sent by the system and by the shell when a terminal is closed: nobody asks for more haste with it.
                    if number == signal.SIGHUP or time.monotonic() - first_s < _SAME_SIGNAL_S:
                        continue
                    logger.warning("Signal (%d) received again: exiting immediately", number)
                    self.end()
                    os._exit(1)  # workers die with their parent
                logger.info("Signal (%d) received.", number)
                first_s = time.monotonic()
                stop.set()

    def lost_log_lines(self) -> int:
        return 0 if self._log is None else self._log.lost_line_count

    def models_loading(self, step: LoadStep) -> None:
        if self._display is None:
            assert self._log is not None, "models load before `begin`"
            bar = self._prints_tables and not self._options.log.file and sys.stdout is not None and sys.stdout.isatty()
            self._display = LoadDisplay(self._log, bar=bar)
        self._display.show(step)

    def models_loaded(self, catalog: Catalog) -> None:
        """Print tables of the models; with JSON logs, write one log line for each model instead."""
        if self._display is not None:
            self._display.close()
        if self._prints_tables:
            if not self._is_short:
                self._print(backends_table(self._backends()))
            self._print(models_table(catalog))
            if not self._is_short:
                self._print(options_table(self._options))
            return
        for item in catalog.index():
            state = f"{item.state}: {item.reason.strip()}" if item.reason else item.state or "not loaded"
            logger.info("model '%s': %s", item.name, state, extra={"model": item.name, "version": item.version})

    @property
    def _is_short(self) -> bool:
        """Whether a person looks at the start, who wants to know about the models: the tables of backends and options
        are then left out, unless --log-verbose asks for more."""
        if self._options.demo:
            return True
        at_terminal = not self._options.log.file and sys.stdout is not None and sys.stdout.isatty()
        return at_terminal and not self._options.log.verbose

    def model_retired(self) -> None:
        """Collect the objects of unloaded models soon, once for all that end together.

        A model and its workers refer to one another. The collector would come to them after many more of them: it
        looks at old objects when it has seen many new ones, and requests make hardly any that it counts.
        """
        if self._collection is None:
            self._collection = asyncio.get_running_loop().call_later(_COLLECTED_AFTER_S, self._collect)

    def _collect(self) -> None:
        self._collection = None
        gc.collect()  # what was there at the start is frozen, so that this takes less than a millisecond

    def advice(self, catalog: Catalog, failed: Sequence[str]) -> str:
        return "see the table above; --exit-on-error=false starts without them"

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        """Print what to try, if the server serves the demo models."""
        # All objects that exist now live as long as the server: the collector need not visit them again.
        gc.collect()
        give_memory_back()
        gc.freeze()
        if "http" in ports and self._prints_tables:
            options = self._options
            url = server_url(options.http_listener.address, ports["http"], tls=options.http.tls is not None)
            specs = [model.spec for model in kernel.catalog.ready_models()]
            openai_url = ""
            if "openai" in ports:
                tls = options.http.tls is not None
                openai_url = server_url(options.openai_listener.address, ports["openai"], tls=tls)
            self._print(demo_hint(url) if options.demo else first_requests(specs, url, openai_url))

    def _print(self, text: str) -> None:
        assert self._log is not None, "printed before `begin`"
        self._log.print(text)

    # ---- called by the composition root ------------------------------------------------------

    def failed(self, reason: str) -> None:
        """Say why the server cannot start."""
        assert self._log is not None, "failed before `begin`"
        if self._prints_tables:
            self._log.print_error(f"error: {printable(reason)}\n")
        else:
            logger.error("%s", reason)

    def end(self) -> None:
        """Write the waiting lines of the log. The wait is limited, in case the log is not read."""
        if self._log is not None:
            self._log.close()


#: No bar is shown of a loading that takes less than this. It is drawn at each call of `LoadDisplay.show`.
FIRST_NS = 1_000_000_000

#: The time before the first line of the log, and between two. Each model has a line when its load begins and ends.
LINE_NS = 10_000_000_000

_BAR_WIDTH = 24


class LoadDisplay:
    """Shows the loading of the models that are served from the start."""

    def __init__(self, log: ServerLog, *, bar: bool) -> None:
        """`bar` for a terminal."""
        self._log = log
        self._bar = bar
        self._next_line_ns = LINE_NS

    def show(self, step: LoadStep) -> None:
        """Show the present step; called several times a second while models load."""
        if self._bar:
            if step.elapsed_ns < FIRST_NS:
                return
            width = shutil.get_terminal_size().columns
            self._log.show_status(bar_text(step, width - 1, colour="NO_COLOR" not in os.environ))
        elif step.elapsed_ns >= self._next_line_ns:
            self._next_line_ns = step.elapsed_ns + LINE_NS
            logger.info("%s", step.text)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar:
            self._log.show_status("")


def bar_text(step: LoadStep, width: int, *, colour: bool) -> str:
    """Return one line of at most `width` columns: the bar, and as much of `LoadStep.text` as there is room for."""
    from rich.console import Console  # takes 5 MiB, and only terminals need it
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    console = Console(
        file=sys.stdout, width=max(width, 1), force_terminal=True, no_color=not colour, legacy_windows=False
    )
    text, room = Text(f" {printable(step.text)} "), width - _BAR_WIDTH
    text.truncate(room, overflow="ellipsis")
    with console.capture() as captured:
        console.print(ProgressBar(step.total, step.ended, width=min(_BAR_WIDTH, width)), end="")
        if room > 1:
            console.print(text, end="", soft_wrap=True)
    return captured.get().replace("\n", "")

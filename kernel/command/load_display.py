"""Shows how far the loading of the models is: a bar on a terminal, else a line of the log every ten seconds."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from typing import TYPE_CHECKING

from kernel.texts import printable

if TYPE_CHECKING:
    from kernel.observe.logs import ServerLog
    from kernel.repository.load_progress import LoadStep

logger = logging.getLogger(__name__)

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

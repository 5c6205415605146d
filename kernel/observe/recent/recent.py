"""What a server remembers for the dashboard: slow and failed requests, and lines of its log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kernel.observe.logs import SettingsFilter
from kernel.observe.recent.recent_lines import RecentLines
from kernel.observe.recent.recent_requests import RecentRequests
from kernel.serving.front_doors.server_parts import ServerPart

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.options import ServerOptions
    from kernel.serving.model import Model
    from kernel.settings import LogSettings


class Recent(ServerPart):
    """Both. A part of the server, and a `kernel.serving.model.ModelExtension`: it gets each model that is loaded."""

    def __init__(self, lines: RecentLines | None = None) -> None:
        """`lines` are None if the log belongs to a program that embeds the server."""
        self.requests = RecentRequests()
        self.lines = lines

    async def start(self) -> None:
        """Remember the lines of the log from now on."""
        if self.lines is not None:
            logging.getLogger().addHandler(self.lines)

    async def close(self) -> None:
        """Remember no more lines."""
        if self.lines is not None:
            logging.getLogger().removeHandler(self.lines)

    async def extend(self, model: Model, folder: Path) -> None:
        """Note slow and failed requests of `model` from now on."""
        model.statistics.note_requests(self.requests.add(model.name), model.version, model.instance_name)


def make_recent(options: ServerOptions, log: LogSettings, *, owned: bool) -> Recent | None:
    """Return what remembers; None if the options disable the dashboard.

    `log` decides which lines are shown; without `owned` the log is that of another program, which is not ours to show.
    """
    if not (options.http_listener.allow and options.http.dashboard):
        return None
    return Recent(RecentLines(SettingsFilter(log)) if owned else None)

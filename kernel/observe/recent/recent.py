"""What a server remembers for the dashboard: slow and failed requests, and lines of its log."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec

from kernel.observe.logs import SettingsFilter
from kernel.observe.recent.recent_lines import RecentLines
from kernel.observe.recent.recent_requests import RecentRequests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kernel.options import ServerOptions
    from kernel.serving.model import Model
    from kernel.settings import LogSettings


class Recent(msgspec.Struct, frozen=True):
    """Both parts. A `kernel.serving.model.ModelExtension`: it gets each model that is loaded."""

    requests: RecentRequests
    #: None if the log belongs to a program that embeds the server.
    lines: RecentLines | None = None

    async def extend(self, model: Model, folder: Path) -> None:
        """Note slow and failed requests of `model` from now on."""
        model.statistics.note_requests(self.requests.add(model.name), model.version, model.instance_name)


@contextlib.contextmanager
def keep_recent(options: ServerOptions, log: LogSettings, *, owned: bool) -> Iterator[Recent | None]:
    """Remember while the block runs; None if the options disable the dashboard.

    `log` decides which lines are shown; without `owned` the log is that of another program, which is not ours to show.
    """
    if not (options.http_listener.allow and options.http.dashboard):
        yield None
        return
    lines = RecentLines(SettingsFilter(log)) if owned else None
    root = logging.getLogger()
    if lines is not None:
        root.addHandler(lines)
    try:
        yield Recent(RecentRequests(), lines)
    finally:
        if lines is not None:
            root.removeHandler(lines)

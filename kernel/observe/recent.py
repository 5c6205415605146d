"""What a server remembers for the dashboard: slow and failed requests, and the last lines of its log.

The memory that they take is limited. The log itself is written elsewhere (`kernel.observe.logs`); here are copies, for
the server and for each model.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kernel.observe.log_lines import current_model
from kernel.observe.logs import SettingsFilter
from kernel.observe.recent_requests import RecentRequests
from kernel.server_parts import ServerPart
from kernel.texts import SERVER_PATHS, limited, shown_text

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kernel.options import ServerOptions
    from kernel.serving.model import Model
    from kernel.settings import LogSettings

#: The most lines of one model, and characters of one line.
MAX_LINES = 120

MAX_LENGTH = 600

#: The most characters of one model, and of all: when there are more, the model with the most loses its oldest lines.
MAX_OF_MODEL = 16 << 10

MAX_OF_ALL = 512 << 10

#: Who has the lines that belong to no model.
SERVER = ""

#: Has a line for each request, if that is asked for: these would leave no room for others.
_ACCESS_LOG = "access"

_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}


class RecentLine(msgspec.Struct, frozen=True):
    """One line of the log. It has no line end and no other control character."""

    #: Grows over all lines of the server.
    number: int
    #: Seconds since the epoch.
    at_s: float
    #: I, W or E.
    level: str
    version: str
    text: str


class LineStore:
    """Lines by model. It has no lock: the owner calls one method at a time. Pure."""

    def __init__(self, max_of_model: int = MAX_OF_MODEL, max_of_all: int = MAX_OF_ALL) -> None:
        self._max_of_model = max_of_model
        self._max_of_all = max_of_all
        self._lines: dict[str, deque[RecentLine]] = {}
        self._sizes: dict[str, int] = {}
        self._size = 0
        self._last_number = 0

    def add(self, model: str, version: str, at_s: float, level: str, text: str) -> None:
        """Add a line, and remove the oldest ones above the limits."""
        self._last_number += 1
        lines = self._lines.setdefault(model, deque())
        lines.append(RecentLine(self._last_number, at_s, level, version, text))
        self._sizes[model] = self._sizes.get(model, 0) + len(text)
        self._size += len(text)
        while len(lines) > 1 and (len(lines) > MAX_LINES or self._sizes[model] > self._max_of_model):
            self._remove_oldest(model)
        while self._size > self._max_of_all:
            self._remove_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def _remove_oldest(self, model: str) -> None:
        lines = self._lines[model]
        length = len(lines.popleft().text)
        self._sizes[model] -= length
        self._size -= length
        if not lines:
            del self._lines[model], self._sizes[model]

    def since(self, model: str, number: int) -> list[RecentLine]:
        """Return the lines of a model whose numbers are larger than `number`, oldest first."""
        lines = self._lines.get(model)
        if lines is None or lines[-1].number <= number:
            return []
        return [line for line in lines if line.number > number]

    def check(self) -> None:
        """Recompute the sizes; for tests."""
        sizes = {model: sum(len(line.text) for line in lines) for model, lines in self._lines.items()}
        assert sizes == self._sizes, "sizes of models are wrong"
        assert sum(sizes.values()) == self._size, "the size of all is wrong"


class RecentLines(logging.Handler):
    """Keeps the records that the log shows. A handler of the root logger; any thread may log."""

    def __init__(self, shown: logging.Filter) -> None:
        """`shown` accepts the records that the log shows now."""
        super().__init__()
        self.addFilter(shown)
        self._store = LineStore()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == _ACCESS_LOG:
            return
        model = getattr(record, "model", None)
        version = getattr(record, "version", "")
        if not model:
            model, version = current_model() or (SERVER, "")
        level = _LETTERS.get(record.levelno, "I")
        for text in _texts(record):
            self._store.add(str(model), str(version), record.created, level, text)

    def since(self, model: str, number: int) -> list[RecentLine]:
        """Return the lines of a model, or of the server for `SERVER`, whose numbers are larger than `number`."""
        self.acquire()
        try:
            return self._store.since(model, number)
        finally:
            self.release()


def _texts(record: logging.LogRecord) -> Iterable[str]:
    """Return the lines of a record, without paths of the server."""
    try:
        text = record.getMessage()
    except (TypeError, ValueError, KeyError):  # a log call with wrong arguments; the log says which
        text = str(record.msg)
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        text = f"{text}\n{type(error).__name__}: {error}"
    lines = limited(text, MAX_LENGTH * 8).split("\n")
    return [shown_text(SERVER_PATHS.hidden_in(line), MAX_LENGTH) for line in lines if line.strip()]


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

    `log` decides which lines are shown; without `owned` another program has the log, which is not ours to show.
    """
    if not (options.http_listener.allow and options.http.dashboard):
        return None
    return Recent(RecentLines(SettingsFilter(log)) if owned else None)

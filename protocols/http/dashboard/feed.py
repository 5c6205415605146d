"""Takes snapshots of the server for the page: one for all viewers, at most once a second.

A snapshot is made from counters, in portions of a few milliseconds between which the event loop serves others. Nothing
runs while no viewer is connected: the first viewer that needs the next snapshot makes it, the others wait for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import msgspec

from kernel.server_parts import DoorProcessList, GenerationFigures
from kernel.serving.catalog import ModelState
from kernel.texts import SERVER_PATHS, shown_text
from protocols.http.dashboard.figures import (
    MAX_REASON,
    ServerFigures,
    idle_row,
    language_row,
    model_detail,
    model_row,
    region_rows,
    server_figures,
    take_language_reading,
    take_reading,
    unchanged,
)
from protocols.http.dashboard.windows import LanguageWindow, Window
from protocols.http.metrics.proc import ProcessLoads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.observe.generation_statistics import GenerationStatistics
    from kernel.serving.catalog import IndexItem
    from kernel.serving.interface import KernelInterface
    from kernel.serving.model_figures import ModelFigures
    from protocols.http.dashboard.figures import ModelDetail, ModelRow

#: Seconds between two snapshots, at least and at most. Between these, making them takes `_MOST_SHARE` of a processor.
INTERVAL_S = 1.0
_MOST_INTERVAL_S = 15.0
_MOST_SHARE = 0.006

#: How long the event loop makes rows without serving others, in seconds, and how many rows it makes between two looks
#: at the clock.
PORTION_S = 0.001
_ROWS_PER_LOOK = 8

Key = tuple[str, str]

_encode = msgspec.json.Encoder().encode


class SentRow:
    """A row as it is sent."""

    __slots__ = ("changed", "item", "ready", "reason", "shown", "static", "text")

    def __init__(self) -> None:
        self.shown: ModelRow | None = None
        #: `shown` in JSON.
        self.text = b""
        self.item: IndexItem | None = None
        #: The reason of the state, in JSON.
        self.reason = b'""'
        self.ready = False
        #: What may change in an idle model: instances, those with which something is wrong, and losses.
        self.static = (0, 0, 0, 0)
        #: The number of the snapshot in which the row or its reason changed last.
        self.changed = 0


class WatchedModel(msgspec.Struct):
    """A loaded version: its newest figures, and what happened to it lately."""

    model: ModelFigures
    window: Window
    identifier: str = ""


class Snapshot(msgspec.Struct):
    """The server at one time. The feed owns it and changes it with the next snapshot."""

    number: int = 0
    now_ns: int = 0
    #: By name and version, in the order of the repository index.
    rows: dict[Key, SentRow] = {}
    #: Keys that are gone, with the number of the snapshot in which they went.
    gone: dict[Key, int] = {}
    server: bytes = b"{}"
    #: The regions of clients, and the number of the snapshot in which they changed last.
    regions: bytes = b"[]"
    regions_changed: int = 0


class Feed:
    """The snapshots of one server."""

    def __init__(
        self,
        kernel: KernelInterface,
        now_ns: Callable[[], int] = time.monotonic_ns,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._kernel = kernel
        self._now_ns = now_ns
        self._interval_s = interval_s
        self._next_s = 0.0
        self._being_made = asyncio.Lock()
        self.snapshot = Snapshot(rows={}, gone={})
        self._windows: dict[Key, WatchedModel] = {}
        #: Models that viewers have chosen, with the number of viewers: the processes of their instances are checked.
        self.chosen: dict[Key, int] = {}
        #: What these have generated, with the counters that the window is of.
        self._languages: dict[Key, tuple[GenerationStatistics, LanguageWindow]] = {}
        self.loads = ProcessLoads()
        #: Seconds of processor time that snapshots have taken on the event loop, for tests and measurements.
        self.spent_s = 0.0

    async def next(self, seen: int) -> Snapshot:
        """Return a snapshot that is newer than the one with the number `seen`, as soon as it is due."""
        async with self._being_made:
            if self.snapshot.number <= seen:
                wait_s = self._next_s - time.monotonic()
                if wait_s > 0 and seen:  # a new viewer does not wait
                    await asyncio.sleep(wait_s)
                await self._make()
            return self.snapshot

    def detail(self, key: Key) -> ModelDetail | None:
        """Return the detail of a version; None if it is not loaded."""
        found = self._windows.get(key)
        if found is None:
            return None
        instances = self._kernel.instance_figures(found.identifier, found.model.version)
        language = self._languages.get(key)
        shown = None if language is None else language_row(*language)
        return model_detail(found.model, instances, found.window, self.loads.found, shown)

    async def _make(self) -> None:
        begin_s = self._next_s = time.monotonic()
        spent_s = self.spent_s
        pids = {os.getpid()}
        for doors in self._kernel.part_figures(DoorProcessList):
            pids.update(door.pid for door in doors.doors if door.pid)
        for key in self.chosen:
            if (found := self._windows.get(key)) is not None:
                pids.update(found.model.statistics.memory.pids.values())
        await asyncio.to_thread(self.loads.look, pids)
        figures = await self._make_rows()
        self._look_at_languages()
        snapshot = self.snapshot
        regions = _encode(region_rows(self._kernel.regions.all()))
        if regions != snapshot.regions:
            snapshot.regions, snapshot.regions_changed = regions, snapshot.number + 1
        snapshot.server = _encode(server_figures(self._kernel, figures, self.loads.found))
        snapshot.number += 1
        spent_s = self.spent_s - spent_s
        interval_s = min(max(self._interval_s, spent_s / _MOST_SHARE), _MOST_INTERVAL_S)
        self._next_s = max(begin_s + interval_s, time.monotonic() + interval_s / 2)

    def _look_at_languages(self) -> None:
        """Read what the chosen models have generated."""
        before, self._languages = self._languages, {}
        for door in self._kernel.part_figures(GenerationFigures):
            for key in self.chosen:
                found = self._windows.get(key)
                statistics = None if found is None else door.statistics.get((key[0], found.model.version_text))
                if statistics is None:
                    continue
                known = before.get(key)
                same = known is not None and known[0] is statistics
                window = known[1] if known is not None and same else LanguageWindow()
                window.add(take_language_reading(statistics, self.snapshot.now_ns))
                self._languages[key] = statistics, window

    async def _make_rows(self) -> ServerFigures:
        """Make the rows that have changed. Other things may happen meanwhile, also loads and unloads."""
        kernel, snapshot = self._kernel, self.snapshot
        figures = ServerFigures()
        number = snapshot.number + 1
        rows: dict[Key, SentRow] = {}
        windows: dict[Key, WatchedModel] = {}
        snapshot.now_ns = self._now_ns()
        begin_s = time.perf_counter()
        for place, identifier in enumerate(kernel.catalog.identifiers()):
            if place % _ROWS_PER_LOOK == _ROWS_PER_LOOK - 1 and time.perf_counter() - begin_s > PORTION_S:
                self.spent_s += time.perf_counter() - begin_s
                await asyncio.sleep(0)
                begin_s = time.perf_counter()
            for item in kernel.catalog.index_of(identifier):
                key = (item.name, item.version)
                while key in rows:  # models of several namespaces with one name
                    key = (key[0], f"{key[1]}'")
                model = kernel.loaded_figures(identifier, int(item.version)) if item.version else None
                row = rows[key] = self._row(key, item, model, windows, number)
                if key in windows:
                    windows[key].identifier = identifier
                figures.add(item.state, row.shown)
        for key in snapshot.rows.keys() - rows.keys():
            snapshot.gone[key] = number
        for key in snapshot.gone.keys() & rows.keys():
            del snapshot.gone[key]
        snapshot.rows, self._windows = rows, windows
        self.spent_s += time.perf_counter() - begin_s
        return figures

    def _row(
        self, key: Key, item: IndexItem, model: ModelFigures | None, windows: dict[Key, WatchedModel], number: int
    ) -> SentRow:
        row = self.snapshot.rows.get(key) or SentRow()
        shown, same = row.shown, row.item == item
        if model is None:
            shown = shown if same and shown is not None else idle_row(item)
        else:
            shown = self._loaded(key, item, model, windows, row)
        if shown is not row.shown or not same:
            text = _encode(shown)
            reason = _encode(shown_text(SERVER_PATHS.hidden_in(item.reason), MAX_REASON, keep="\n"))
            if text != row.text or reason != row.reason:
                row.text, row.reason, row.changed = text, reason, number
            row.ready = item.state == ModelState.READY.value
            row.shown, row.item = shown, item
        return row

    def _loaded(
        self, key: Key, item: IndexItem, model: ModelFigures, windows: dict[Key, WatchedModel], row: SentRow
    ) -> ModelRow:
        """Return what is shown of a loaded version, which is the same object as before if nothing has happened."""
        now_ns = self.snapshot.now_ns
        statistics = model.statistics
        static = (model.instance_count, model.condition_count, statistics.workers_lost, statistics.workers_restarted)
        same = row.static == static and row.item == item
        row.static = static
        watched = self._windows.get(key)
        if watched is None or watched.model.statistics is not statistics:  # another load has counters of its own
            watched = WatchedModel(model, Window(take_reading(model, now_ns)))
        elif unchanged(model, watched.window):
            same = same and watched.window.resting
            watched.window.rest(now_ns)
            if same and row.shown is not None:
                watched.model, windows[key] = model, watched
                return row.shown
        else:
            watched.window.add(take_reading(model, now_ns))
        watched.model, windows[key] = model, watched
        return model_row(item, model, watched.window, now_ns)


def rows_for(snapshot: Snapshot, seen: int, *, all_states: bool) -> Iterable[bytes]:
    """Yield the rows that have changed since the snapshot with the number `seen`, in JSON, with their reasons.

    Without `all_states` only those that are ready, and no reasons: the viewer may not see the index.
    """
    for row in snapshot.rows.values():
        if row.changed <= seen:
            continue
        if all_states:
            yield b'{"row":%b,"reason":%b}' % (row.text, row.reason)
        elif row.ready:
            yield b'{"row":%b}' % row.text

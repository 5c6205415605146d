"""The loads that run. An unload of a model and the end of the server end those that hang; the log names long ones.

Only some loads run at a time. Without this module, models that hang in `initialize` let all other loads wait until
--model-load-timeout-secs has passed, and the log says nothing about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kernel.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator

    from kernel.loop.clock import Clock

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: After how many seconds a load is reported for the first time. Each further report comes after twice the time.
REPORT_S = 60.0

#: How often loads are looked at, in seconds.
LOOK_S = 5.0

#: How many models that load are named in a line, and have a line of their own, at a time.
_NAMED, _LINES = 3, 8


class LoadEnded(Unavailable):
    """The load was ended before it was done."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the load was ended, because {cause}")


class RunningLoads:
    """The loads of each model's versions. A model has one load at a time; further ones wait."""

    def __init__(self) -> None:
        #: Identifier → the tasks of its load.
        self._tasks: dict[str, list[asyncio.Task[Any]]] = {}
        #: Identifier → how often its loads were ended.
        self._ends: dict[str, int] = {}
        #: Whether no load is done any more.
        self._stopped = False

    def mark(self, identifier: str) -> int:
        """Return what `check` gets when the load of a model has waited for the one before it."""
        return self._ends.get(identifier, 0)

    def check(self, identifier: str, mark: int) -> None:
        """Raise `LoadEnded` if the loads of the model were ended since `mark` was returned."""
        if self._stopped or self._ends.get(identifier, 0) != mark:
            raise self._error()

    async def run(self, identifier: str, loads: Collection[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run the loads of a model's versions at the same time. Returns their results and errors, in this order."""
        tasks = self._tasks[identifier] = [asyncio.create_task(load) for load in loads]
        if self._stopped:
            self.end(identifier)
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._tasks.pop(identifier, None)
        return [self._error() if isinstance(result, asyncio.CancelledError) else result for result in results]

    async def run_one(self, identifier: str, work: Coroutine[Any, Any, T]) -> T:
        """Do a part of a load that may be ended. Returns its result. Raises its error, or `LoadEnded`."""
        [result] = await self.run(identifier, [work])
        if isinstance(result, BaseException):
            raise result
        found: T = result
        return found

    @contextlib.asynccontextmanager
    async def ended_after(self, limit_s: float, identifier: str, lock: asyncio.Lock) -> AsyncIterator[None]:
        """Hold `lock`, which loads of the model hold. Those that keep it for more than `limit_s` seconds are ended."""
        timer = asyncio.get_running_loop().call_later(limit_s, self.end, identifier)
        try:
            async with lock:
                timer.cancel()
                yield
        finally:
            timer.cancel()

    def end(self, identifier: str) -> None:
        """End the load of a model that runs, and let those fail that wait for it."""
        self._ends[identifier] = self._ends.get(identifier, 0) + 1
        for task in self._tasks.pop(identifier, ()):
            task.cancel()

    def end_all(self) -> None:
        """End all loads, also those to come: the server stops, and its front doors wait for the clients of loads."""
        self._stopped = True
        for identifier in list(self._tasks):
            self.end(identifier)

    def _error(self) -> LoadEnded:
        return LoadEnded("the server stops" if self._stopped else "the model was unloaded meanwhile")


class _Load(msgspec.Struct):
    """A load of a version."""

    name: str
    version: int
    begun_ns: int
    #: When it is reported next, in nanoseconds after it has begun.
    report_ns: int
    #: Whether it has got its turn (--model-load-thread-count).
    has_turn: bool = False

    @property
    def title(self) -> str:
        return f"model '{self.name}' version {self.version}"

    def seconds(self, now_ns: int) -> int:
        """Return since how many seconds it loads or waits."""
        return (now_ns - self.begun_ns) // 1_000_000_000


class LongLoads:
    """Decides which loads are reported, and how. Pure."""

    def __init__(self, thread_count: int, timeout_s: float, *, explicit: bool) -> None:
        """The arguments are settings of the server: how many loads may work at the same time, how long each step of a
        load may take (0 for no limit), and whether clients may unload models."""
        self._thread_count = thread_count
        ends = ["an unload request ends it"] if explicit else []
        ends += [f"each of its steps may take {timeout_s:g} s (--model-load-timeout-secs)"] if timeout_s else []
        self._ends = f"; {', '.join(ends)}" if ends else ""
        self._loads: dict[int, _Load] = {}
        self._last = 0

    @property
    def empty(self) -> bool:
        """Whether nothing loads."""
        return not self._loads

    def begin(self, name: str, version: int, now_ns: int) -> int:
        """Note a load that waits for its turn; returns its number."""
        self._last += 1
        self._loads[self._last] = _Load(name, version, now_ns, round(REPORT_S * 1e9))
        return self._last

    def turn(self, number: int) -> None:
        """The load has got its turn."""
        self._loads[number].has_turn = True

    def end(self, number: int) -> None:
        """The load has ended, in whatever way."""
        del self._loads[number]

    def due(self, now_ns: int) -> list[str]:
        """Return the lines about loads that are to be reported now."""
        due = [load for load in self._loads.values() if now_ns - load.begun_ns >= load.report_ns]
        for load in due:
            while load.report_ns <= now_ns - load.begun_ns:
                load.report_ns *= 2
        loading, waiting = [load for load in due if load.has_turn], [load for load in due if not load.has_turn]
        lines = [f"{load.title} has been loading for {load.seconds(now_ns)} s{self._ends}" for load in loading[:_LINES]]
        if len(loading) > _LINES:
            lines.append(f"{len(loading) - _LINES} more models have been loading for as long")
        if waiting:
            who = f"{waiting[0].title} and {len(waiting) - 1} more have" if waiting[1:] else f"{waiting[0].title} has"
            lines.append(
                f"{who} waited for {waiting[0].seconds(now_ns)} s until other models are loaded: {self._names()} "
                f"(--model-load-thread-count={self._thread_count})"
            )
        return lines

    def _names(self) -> str:
        names = [f"'{load.name}'" for load in self._loads.values() if load.has_turn]
        more = len(names) - _NAMED
        return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class LoadReports:
    """Logs what `LongLoads` finds. There is a timer only while something loads."""

    def __init__(self, loads: LongLoads, clock: Clock) -> None:
        self._loads = loads
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def of(self, name: str, version: int) -> Iterator[Callable[[], None]]:
        """Report the load that the `with` block does, if it takes long. It calls what it gets when it has its turn."""
        number = self._loads.begin(name, version, self._clock.now_ns())
        self._look_later()
        try:
            yield lambda: self._loads.turn(number)
        finally:
            self._loads.end(number)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        for line in self._loads.due(self._clock.now_ns()):
            logger.warning("%s", line)
        if not self._loads.empty:
            self._look_later()

"""Polls the repositories again and again, and loads what has changed: what a poll finds, and all models at the start.

`FailedLoads` says when polling tries again to load a model that has failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from kernel.file_threads import in_file_thread, oldest_path
from kernel.observe.limited_log import LimitedLog
from kernel.repository.ensembles import LoadRequest
from kernel.server_parts import RepositoryFigures

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from kernel.background import FailureCount
    from kernel.loop.clock import Clock
    from kernel.repository.ensembles import Composition, ModelLoader
    from kernel.repository.layout import ModelFolder
    from kernel.repository.load_progress import LoadProgress
    from kernel.repository.settings import LifecycleSettings
    from kernel.serving.model import Model

#: The longest pause between two attempts, in nanoseconds.
MAX_PAUSE_NS = 300_000_000_000


class _Failed(msgspec.Struct):
    #: The files that could not be loaded.
    folder: ModelFolder
    pause_ns: int
    next_ns: int


class FailedLoads:
    """The models of the repositories whose last load has failed.

    Changed files are tried at once. The same files are tried again after growing pauses: the cause may lie elsewhere,
    as memory or a package that was not there, and each attempt costs the time of a load.
    """

    def __init__(self, poll_ns: int) -> None:
        """`poll_ns` is the time between two polls, and the first pause."""
        self._poll_ns = poll_ns
        #: By the models' identifiers.
        self._failed: dict[str, _Failed] = {}

    def has(self, identifier: str) -> bool:
        """Whether the last load of a model has failed."""
        return identifier in self._failed

    def is_due(self, folder: ModelFolder, now_ns: int) -> bool:
        """Whether a poll loads `folder`: a model that has not failed, that has changed, or whose pause is over."""
        failed = self._failed.get(folder.identifier)
        return failed is None or failed.folder != folder or now_ns >= failed.next_ns

    def ended(self, folder: ModelFolder, now_ns: int, *, failed: bool) -> None:
        """A load of `folder` has ended."""
        if not failed:
            self._failed.pop(folder.identifier, None)
            return
        former = self._failed.get(folder.identifier)
        again = former is not None and former.folder == folder
        pause_ns = min(former.pause_ns * 2, MAX_PAUSE_NS) if again and former is not None else self._poll_ns
        # Polls come a little late, and never early.
        self._failed[folder.identifier] = _Failed(folder, pause_ns, now_ns + pause_ns - self._poll_ns // 2)


class RepositoryLoads:
    """Loads models together. Nobody asks for one of these loads: the log and the repository index say how they end."""

    def __init__(
        self,
        loader: ModelLoader,
        composition: Composition,
        progress: LoadProgress,
        settings: LifecycleSettings,
        clock: Clock,
        serving: Callable[[str], Iterable[Model]],
    ) -> None:
        """`serving` returns the versions that serve, by the model's identifier."""
        self._loader = loader
        self._composition = composition
        self._progress = progress
        self._settings = settings
        self._clock = clock
        self._serving = serving
        self._failed_loads = FailedLoads(round(settings.poll_s * 1e9))
        #: Identifier → the folder that the model was loaded from; None if a client gave its files. A configuration that
        #: a client gave stays until the folder changes (Triton). The lifecycle changes it.
        self.sources: dict[str, ModelFolder | None] = {}

    async def load_all(self, folders: Iterable[ModelFolder], *, with_parts: bool = False) -> list[str]:
        """Load models at the same time, then ensembles, and return the names of those that failed.

        Without `with_parts` the models of all steps are among `folders`.
        """
        failed: list[str] = []

        async def load(folder: ModelFolder) -> None:
            try:
                await self._loader.load_model(folder, LoadRequest(with_parts=with_parts))
            except ServingError as error:
                failed.append(folder.name)
                self._ended(folder, error)
            else:
                self._ended(folder, None)

        models, ensembles = await self._composition.split(folders, self._settings.config_name)
        async with asyncio.TaskGroup() as tasks:
            for folder in models:
                tasks.create_task(load(folder))
        for folder in ensembles:
            await load(folder)
        return failed

    async def load_changed(self, folders: Iterable[ModelFolder]) -> None:
        """Load what has changed of all models of the repositories, and what failed and is tried again.

        In thousands of models few have changed: the others cost a comparison, in a thread, and no task.
        """
        await self.load_all(await in_file_thread(self._due, list(folders), self._clock.now_ns()))

    def _due(self, folders: Iterable[ModelFolder], now_ns: int) -> list[ModelFolder]:
        return [
            folder
            for folder in folders
            if (self.sources.get(folder.identifier) != folder or self._failed_loads.has(folder.identifier)
                or self._composition.ensembles.find(folder.identifier) is not None)
            and self._failed_loads.is_due(folder, now_ns)
        ]  # fmt: skip

    def _ended(self, folder: ModelFolder, error: ServingError | None) -> None:
        now_ns, failed = self._clock.now_ns(), error is not None
        self._progress.ended(folder.identifier, now_ns, failed=failed)
        self._failed_loads.ended(folder, now_ns, failed=failed)
        cause = error.__cause__ if error is not None and isinstance(error.__cause__, ServingError) else error
        serving = list(self._serving(folder.identifier))
        if serving and failed:
            logger.warning("model '%s' continues to serve with the files that it was loaded from", folder.identifier)
        for model in serving:
            model.reload_error = "" if cause is None else f"{cause.code.title}: {cause.message.rstrip()}"


logger = logging.getLogger(__name__)

#: A repository that cannot be read fails each poll.
_failures = LimitedLog(logger)

#: After how many seconds a poll is reported for the first time. Each further report comes after twice the time.
REPORT_S = 30.0


class RepositoryPolling:
    """The polls of one server."""

    def __init__(
        self,
        poll: Callable[[], Awaitable[None]],
        slowest_listing: Callable[[], tuple[float, str] | None],
        interval_s: float,
        failures: FailureCount,
    ) -> None:
        """`poll` looks at the repositories once, and raises `ServingError` if one cannot be read.

        It may leave repositories behind that are still being listed: `slowest_listing` returns since when the first one
        is (of the monotonic clock) and its path, None for none. `failures` counts work in the background that has
        failed.
        """
        self._failures = failures
        self._poll = poll
        self._slowest_listing = slowest_listing
        self._interval_s = interval_s
        #: When the repositories were last polled without a failure, in seconds since the epoch; None if never.
        self.succeeded_s: float | None = None
        #: Why the last poll has failed; empty if it has not.
        self._failure = ""
        #: Since when a poll runs (of the monotonic clock), None if none does.
        self._begun_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def figures(self) -> RepositoryFigures:
        """Return what metrics and the page show."""
        return RepositoryFigures(self._failures.value, self.succeeded_s, self.trouble())

    async def run(self) -> None:
        """Poll until cancelled. Raises what a poll raises that nobody expects."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.once()

    async def once(self) -> None:
        """Poll. Logs why the repositories cannot be read, if so."""
        self._begun_s = time.monotonic()
        if self._timer is None:
            self._report_after(REPORT_S)
        try:
            await self._poll()
        except ServingError as error:
            self._failure = error.message
            _failures.log("the poll", "failed to poll model repository: %s", error.message)
        except Exception as error:
            self._failure = f"unexpected {type(error).__name__}"
            raise
        else:
            self._failure = ""
            if self._slowest_listing() is None:
                self.succeeded_s = time.time()
        finally:
            self._begun_s = None
            if self._timer is not None and self._slowest_listing() is None:
                self._timer.cancel()
                self._timer = None

    def trouble(self) -> str:
        """Return what is wrong with the polls now, in a sentence for people; empty if nothing is."""
        if (since_s := self._waiting_s()) >= REPORT_S:
            return self._waits(since_s)
        return f"The last poll of the model repositories has failed: {self._failure}" if self._failure else ""

    def _waiting_s(self) -> float:
        begun_s, listing = self._begun_s, self._slowest_listing()
        if listing is not None:
            begun_s = listing[0] if begun_s is None else min(begun_s, listing[0])
        return 0.0 if begun_s is None else time.monotonic() - begun_s

    def _waits(self, since_s: float) -> str:
        if path := oldest_path():
            what = f"waits for the file system at '{path}'"
        elif (listing := self._slowest_listing()) is not None:
            what = f"waits for the listing of '{listing[1]}'"
        else:
            what = "waits for the loads of models"
        return f"The poll of the model repositories has lasted for {since_s:.0f} s: it {what}"

    def _report_after(self, time_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(time_s, self._report, time_s)

    def _report(self, time_s: float) -> None:
        self._timer = None
        if (since_s := self._waiting_s()) >= REPORT_S:
            logger.warning("%s", self._waits(since_s))
            self._report_after(2 * time_s)
        elif self._begun_s is not None:  # what an earlier poll has left behind has ended
            self._report_after(REPORT_S)

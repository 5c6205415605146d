"""Polls the repositories again and again, and knows what keeps a poll from its end."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kernel.errors import ServingError
from kernel.files.file_threads import oldest_path
from kernel.observe.repeats.limited_log import LimitedLog
from kernel.serving.front_doors.server_parts import RepositoryFigures

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.repository.background import FailureCount

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

"""The inbox of a scheduler: it steps the scheduler's coroutine in the call that posts an event.

A scheduler awaits nothing but `inbox.next(until_ns)`, so a step is one `send`: no task, no queue, no further
event-loop iteration (0.5 µs instead of 11 µs, docs/decisions/stepped-schedulers.md).
"""

from __future__ import annotations

import logging
import types
from collections import deque
from typing import TYPE_CHECKING

from kernel.observe.limited_log import LimitedLog
from kernel.serving.events import ChildResponded, DeadlineReached

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from kernel.loop.clock import Clock
    from kernel.serving.events import Event

_failures = LimitedLog(logging.getLogger(__name__))

_DEADLINE_REACHED = DeadlineReached()


class BadScheduler(TypeError):
    """A scheduler awaited something other than its inbox, or returned."""


class Inbox:
    """Delivers events to one scheduler.

    `start` takes the coroutine; `post` runs it until it waits again. An exception ends the scheduler and is passed to
    `on_crash`. The owner of the inbox may then start a new coroutine.
    """

    def __init__(self, clock: Clock, on_crash: Callable[[Exception], None], name: str = "") -> None:
        """`name` is the model's, for the log."""
        self._name = name
        self._alarm = clock.alarm(self._deadline_reached)
        self._on_crash = on_crash
        self._events: deque[Event] = deque()
        self._coroutine: Coroutine[int | None, Event, None] | None = None
        self._stepping = False
        #: The time to which the alarm is set.
        self._until_ns: int | None = None

    def start(self, scheduler: Coroutine[int | None, Event, None]) -> None:
        """Run `scheduler` up to its first wait. Raises what it raises until then, and it has ended.

        `on_crash` may call it, within the step that failed: events wait until that step is over.
        """
        assert self._coroutine is None, "the inbox has a scheduler already"
        self._coroutine = scheduler
        within_step, self._stepping = self._stepping, True
        try:
            until_ns = scheduler.send(None)  # type: ignore[arg-type]  # None starts a coroutine
            _check_awaited(until_ns)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                raise BadScheduler("a scheduler must not return") from None
            raise
        finally:
            self._stepping = within_step
        self._until_ns = until_ns
        self._alarm.set(until_ns)

    @property
    def open(self) -> bool:
        """Whether a scheduler gets the events. Otherwise they are dropped: nothing with leases may be posted."""
        return self._coroutine is not None

    def close(self) -> None:
        """End the scheduler. Later events are dropped."""
        self._until_ns = None
        self._alarm.close()
        dropped = list(self._events)
        self._events.clear()
        if self._coroutine is not None:
            coroutine, self._coroutine = self._coroutine, None
            coroutine.close()
        for event in dropped:
            if isinstance(event, ChildResponded):
                event.response.release()

    @types.coroutine
    def next(self, until_ns: int | None = None) -> Generator[int | None, Event, Event]:
        """Return the next event, or `DeadlineReached` once `until_ns` has passed.

        `until_ns` must be in the future: with a past time the loop would spin. `clock.ITERATION_END` is the end of the
        event-loop iteration, when all requests that were received in it have been submitted.
        """
        return (yield until_ns)

    def post(self, event: Event) -> None:
        """Deliver `event`: run the scheduler until it waits again."""
        if self._stepping:
            # A step can post more events: a dispatch that fails makes its instance idle. They are delivered after the
            # step, because a running coroutine cannot be stepped again.
            self._events.append(event)
            return
        while self._coroutine is not None:
            self._stepping = True
            try:
                until_ns = self._coroutine.send(event)
                if until_ns is not None and type(until_ns) is not int:
                    _check_awaited(until_ns)
            except StopIteration:
                self._crashed(BadScheduler("a scheduler must not return"))
            except Exception as error:
                self._crashed(error)
            else:
                if until_ns != self._until_ns:
                    self._until_ns = until_ns
                    self._alarm.set(until_ns)
            finally:
                self._stepping = False
            if not self._events:
                return
            event = self._events.popleft()

    def _crashed(self, error: Exception) -> None:
        self.close()
        subject = f"the scheduler of model '{self._name}'"
        _failures.log(f"{subject} ({type(error).__name__})", "%s failed", subject, exc_info=error)
        self._on_crash(error)

    def _deadline_reached(self) -> None:
        self._until_ns = None
        self.post(_DEADLINE_REACHED)


def _check_awaited(until_ns: object) -> None:
    if until_ns is not None and type(until_ns) is not int:
        raise BadScheduler(f"a scheduler may await only inbox.next, this one awaited {until_ns!r}")

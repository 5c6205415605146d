"""Decides which model executes in a process of several models: one at a time, in the order of their requests."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class TakesTurns(Protocol):
    """One of the models of a process."""

    def enter_turn(self) -> None:
        """Its turn begins, and another model had the last one, or none."""

    def leave_turn(self) -> None:
        """Another model's turn begins."""


class Turn:
    """A fair lock: threads get it in the order in which they asked.

    A lock of Python would often go to the thread that has just released it. Changes to the interpreter for one model
    (`TakesTurns`) are made only when another model executes, so that many requests in a row to one model need none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()
        self._last: TakesTurns | None = None

    @contextlib.contextmanager
    def of(self, model: TakesTurns) -> Iterator[None]:
        """Wait for the turn of `model`; it ends with the `with` block."""
        self._take()
        try:
            self._enter(model)
            yield
        finally:
            self._give_on()

    @contextlib.contextmanager
    def given_on(self, model: TakesTurns) -> Iterator[None]:
        """Within a turn of `model`: let others have theirs in the `with` block, and wait for the turn after it."""
        self._give_on()
        try:
            yield
        finally:
            self._take()
            self._enter(model)

    def forget(self, model: TakesTurns) -> None:
        """The model has ended."""
        self._take()
        try:
            if self._last is model:
                self._last = None
                model.leave_turn()
        finally:
            self._give_on()

    def _enter(self, model: TakesTurns) -> None:
        if self._last is model:
            return
        last, self._last = self._last, None
        if last is not None:
            last.leave_turn()
        model.enter_turn()
        self._last = model

    def _take(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def _give_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

"""Which task a free helper runs next. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.serving.helper_tasks import HelperTask

#: A task with more bytes of sources is large: it takes up to seconds, others milliseconds.
LARGE_BYTE_SIZE = 256 << 10


class TaskQueue:
    """Tasks that wait for a helper. One helper is kept free of large tasks, so that small ones never wait for them."""

    def __init__(self, helper_count: int) -> None:
        self._max_running_large = max(1, helper_count - 1)
        self._running_large = 0
        self._number = 0
        self._small: deque[tuple[int, HelperTask]] = deque()
        self._large: deque[tuple[int, HelperTask]] = deque()

    def __len__(self) -> int:
        return len(self._small) + len(self._large)

    def add(self, task: HelperTask) -> None:
        """Let `task` wait."""
        self._number += 1
        (self._large if is_large(task) else self._small).append((self._number, task))

    def take(self) -> HelperTask | None:
        """Return the oldest task that may run on a free helper, which `ended` must be called for; None if none may."""
        large = self._large if self._running_large < self._max_running_large else None
        if large and (not self._small or large[0][0] < self._small[0][0]):
            self._running_large += 1
            return large.popleft()[1]
        return self._small.popleft()[1] if self._small else None

    def remove(self, task: HelperTask) -> bool:
        """Return whether `task` waited; then it does not any more."""
        for waiting in (self._small, self._large):
            for entry in waiting:
                if entry[1] is task:
                    waiting.remove(entry)
                    return True
        return False

    def ended(self, task: HelperTask) -> None:
        """A task that `take` returned does not run any more."""
        if is_large(task):
            self._running_large -= 1


def is_large(task: HelperTask) -> bool:
    return sum(source.byte_size for source in task.sources) > LARGE_BYTE_SIZE

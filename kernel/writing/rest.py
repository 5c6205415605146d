"""How long a helper rests before it writes again. Pure.

A file is copied to add to it, so that what is written seldom costs less. But a rest may only make what waits late: it
ends when a whole task waits, and then the helper, which has low priority, works as long as it is behind.
"""

from __future__ import annotations

#: A task with less than this part of what a task may have costs the kernel more than it is worth without a rest.
_SMALL_TASK = 1 / 8


def is_behind(waiting: float, next_task: float) -> bool:
    """Whether the helper writes without a rest.

    `waiting` and `next_task` are all that waits and what the next task takes of it, in parts of the largest task.
    """
    return waiting >= 1 and next_task >= _SMALL_TASK


def rest_s(took_s: float, factor: float, delay_s: float, waiting: float, next_task: float) -> float:
    """Return the rest after a task that took `took_s` seconds, `factor` times as long unless the helper is behind.

    `delay_s` is how long anything waits for more that is written with it, unless a whole task waits. `waiting` and
    `next_task` are those of `is_behind`.
    """
    if is_behind(waiting, next_task):
        return 0.0
    return max(took_s * factor, 0.0 if waiting >= 1 else delay_s)

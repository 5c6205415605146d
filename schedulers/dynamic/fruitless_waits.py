"""Whether it pays to wait for a larger batch, learned from earlier waits. No clock, no I/O, no asyncio.

`max_queue_delay_microseconds` is the longest time that a request waits for others. Often none can come: four clients
that wait for their responses send four requests, and for the rest of the delay all of them wait for nothing. So if many
waits in a row have ended with the same number of rows, and nothing came in the second half of the delay, a batch with
this number of rows starts at once. Now and then one waits again, to notice new clients.

What was learned may be wrong. Two rules make mistakes rare:

- If requests arrive irregularly, many waits can be fruitless by chance. Each time a wait shows that more requests come,
  the next decision needs twice as many fruitless waits.
- A request that comes just after a batch has started waits until its execution ends. If an execution takes longer than
  the delay, the decision needs more fruitless waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: After this many fruitless waits in a row, batches start at once, if an execution takes no longer than the delay. If
#: it takes ten times the delay, ten times as many waits are needed. With requests at random times, 0.3 per delay on
#: average, one of 120 series of 16 waits is fruitless by chance.
ENOUGH = 16

#: After this many batches that started at once, one waits. It costs little time, and new clients are noticed soon.
WAIT_AFTER = 64

#: The number of waits is doubled at most this often. It has its first value again after `ENOUGH` waits, one after each
#: `WAIT_AFTER` batches, of which none showed a mistake.
MOST_DOUBLINGS = 3


class FruitlessWaits:
    """The last waits of one model's batches. Times are monotonic nanoseconds from the caller; sizes are in rows."""

    def __init__(self, delay_ns: int, execution_ns: Callable[[], int], *, learns: bool = True) -> None:
        """`delay_ns` is the longest wait, `execution_ns` returns how long executions take.

        Without `learns` each batch waits for the whole delay.
        """
        self._delay_ns = delay_ns
        self._execution_ns = execution_ns
        self._learns = learns
        #: The number of rows with which the last waits have ended, and how many fruitless ones in a row.
        self._rows = 0
        self._count = 0
        #: How many are enough, and how often this number was doubled.
        self._enough = ENOUGH
        self._doublings = 0
        #: How many waits have confirmed what was learned since it was wrong.
        self._confirmed = 0
        #: How many batches have started at once since the last wait.
        self._started_at_once = 0
        #: The batch that waits: its rows, and since when it has them.
        self._waiting_rows = 0
        self._since_ns = 0

    def should_wait(self, rows: int, now_ns: int) -> bool:
        """Return whether a batch with `rows` rows waits for more, although an instance is free. If not, it starts."""
        if rows == self._rows and self._count >= self._enough and self._started_at_once < WAIT_AFTER:
            self._started_at_once += 1
            self._waiting_rows = 0
            return False
        if rows != self._waiting_rows:
            self._waiting_rows, self._since_ns = rows, now_ns
        return True

    def waited(self, rows: int, now_ns: int) -> None:
        """A batch starts because its oldest request has waited for the whole delay, perhaps for an instance."""
        fruitless = rows == self._waiting_rows and 2 * (now_ns - self._since_ns) >= self._delay_ns
        if rows > self._rows:
            self._note_mistake()
        if not fruitless or not self._learns:
            self._count = 0
        elif rows == self._rows:
            self._count += 1
            self._note_confirmation()
        else:
            self._rows, self._count = rows, 1
        self._started_at_once = self._waiting_rows = 0
        if self._count >= ENOUGH:
            longer = max(self._delay_ns, self._execution_ns())
            self._enough = (ENOUGH * longer // self._delay_ns) << self._doublings

    def filled(self) -> None:
        """A batch starts because it is as large as it may be: enough requests come."""
        self._note_mistake()
        self._count = self._started_at_once = self._waiting_rows = 0

    def _note_confirmation(self) -> None:
        if self._started_at_once == WAIT_AFTER:
            self._confirmed += 1
            if self._confirmed == ENOUGH:
                self._doublings = 0

    def _note_mistake(self) -> None:
        """A batch has got more rows than expected. After batches that started at once, these should have waited."""
        if self._started_at_once == WAIT_AFTER:
            self._confirmed = 0
            self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)

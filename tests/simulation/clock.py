"""The clock of the simulation: it tells when the next alarm rings, so that the world can stop there."""

from __future__ import annotations

from kernel.loop.clock import ITERATION_END
from kernel.testing import FakeClock


class SimulatedClock(FakeClock):
    """A clock on which alarms ring `lateness_ns` after their time."""

    def __init__(self, lateness_ns: int) -> None:
        super().__init__()
        self._lateness_ns = lateness_ns

    def next_alarm_ns(self) -> int | None:
        """Return when the next alarm rings, or None."""
        times = [a.at_ns for a in self.alarms if a.at_ns is not None and a.at_ns != ITERATION_END]
        return max(min(times) + self._lateness_ns, self.time_ns) if times else None

    def ring_due(self) -> None:
        """Ring the alarms whose time has come, in the order of their times."""
        due = sorted(
            (a.at_ns, number)
            for number, a in enumerate(self.alarms)
            if a.at_ns is not None and a.at_ns != ITERATION_END and a.at_ns + self._lateness_ns <= self.time_ns
        )
        for at_ns, number in due:
            alarm = self.alarms[number]
            if alarm.at_ns == at_ns:  # not changed by an alarm that rang before
                alarm.ring()

    @property
    def waits_for_iteration_end(self) -> bool:
        """Whether an alarm rings at the end of this event-loop iteration."""
        return any(alarm.at_ns == ITERATION_END for alarm in self.alarms)

"""Shows how far a build is, and ends it on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class PhaseDisplay(Protocol):
    """Shows phases of a build, which lie within one another."""

    def phase(self, name: str, parent: str, step_count: int) -> None:
        """A phase begins."""

    def steps(self, name: str, done: int) -> None:
        """The phase has done this many of its steps."""

    def ended(self, name: str) -> None:
        """It has ended."""


def progress_monitor(module: Any, display: PhaseDisplay, cancelled: Callable[[], bool]) -> Any:
    """Return a `tensorrt.IProgressMonitor`. TensorRT calls it from any thread, and takes no exceptions.

    The build ends soon after `cancelled` is true.
    """

    class Monitor(module.IProgressMonitor):  # type: ignore[misc]  # a class that is known only now
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            display.phase(phase_name, parent_phase or "", num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            display.steps(phase_name, step + 1)
            return not cancelled()

        def phase_finish(self, phase_name: str) -> None:
            display.ended(phase_name)

    return Monitor()


class NoDisplay:
    """Shows nothing, because standard error is not a terminal."""

    def phase(self, name: str, parent: str, step_count: int) -> None:
        """See `PhaseDisplay`."""

    def steps(self, name: str, done: int) -> None:
        """See `PhaseDisplay`."""

    def ended(self, name: str) -> None:
        """See `PhaseDisplay`."""


class BarDisplay:
    """A bar of `rich.progress` for each phase that is going on. A `PhaseDisplay`."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}
        self._depths: dict[str, int] = {}

    def phase(self, name: str, parent: str, step_count: int) -> None:
        depth = self._depths[name] = self._depths.get(parent, -1) + 1
        self._tasks[name] = self._progress.add_task(f"{'  ' * depth}{name}", total=max(step_count, 1))

    def steps(self, name: str, done: int) -> None:
        if name in self._tasks:
            self._progress.update(self._tasks[name], completed=done)

    def ended(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)

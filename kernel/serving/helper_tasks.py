"""Work that a helper process does for a front door, because it takes too long for the event loop.

A front door makes a task and starts it. The helper may ask for memory once, with a message about what it has found out
so far. Then the task ends with a result or an error. All methods of tasks are called in the kernel's loop.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from shm.tensor import Buffer, Span, Tensor


class HelperTask(Protocol):
    """One task: the helper calls the function `name` with `arguments` and the bytes of `sources`.

    The task owns the leases of its sources, and of all memory that it gives or gets. It releases them when it has
    ended, and not before: until then the helper may use the memory.
    """

    name: str
    #: What the function needs to know, encoded by the front door.
    arguments: bytes
    #: Inline or in spans of arenas.
    sources: list[Tensor]

    @property
    def peer(self) -> str:
        """Whose task it is: peers get equal parts of the helpers' time. Empty if that is not known."""

    def needs_memory(self, message: bytes) -> Span:
        """Return a writable span of an arena of this process for the result.

        `message` says what the function has found out so far. Raises `ServingError`: the task fails with it.
        """

    def done(self, result: bytes, output: Tensor | None) -> None:
        """The function has returned `result`, and `output` if it wrote bytes into memory of the helper. Never raises.

        The task owns the lease of `output` from now on.
        """

    def failed(self, error: ServingError) -> None:
        """The function has raised `error`, the task was cancelled, or the helper was lost. Never raises."""


class MessageTask:
    """A task whose result is a message. A `HelperTask`.

    It releases the leases of its sources when it has ended.
    """

    def __init__(
        self,
        name: str,
        arguments: bytes = b"",
        sources: Sequence[Tensor] = (),
        *,
        peer: str = "",
        ended: Callable[[bytes | ServingError], object] | None = None,
    ) -> None:
        """`ended` gets the result, or the error; None where the helper's caller gets both."""
        self.name = name
        self.arguments = arguments
        self.sources = list(sources)
        self.peer = peer
        self._ended = ended

    def needs_memory(self, message: bytes) -> Span:
        """Refuse: the result is small."""
        raise InternalError(f"task {self.name} needs no memory of the server")

    def done(self, result: bytes, output: Tensor | None) -> None:
        if output is not None:
            output.release()
        self._end(result)

    def failed(self, error: ServingError) -> None:
        self._end(error)

    def _end(self, result: bytes | ServingError) -> None:
        for source in self.sources:
            source.release()
        if self._ended is not None:
            self._ended(result)


class Helpers(Protocol):
    """Runs tasks. Implemented by `backends.helper.pool`."""

    def add(self, task: HelperTask) -> None:
        """Run `task` as soon as a helper is free. `done` or `failed` ends it, later or before this returns."""

    def cancel(self, task: HelperTask) -> None:
        """The result is not wanted any more. A task that waits for a helper fails at once, a running one ends as if it
        was not cancelled."""


class FrontDoorHelpers(Helpers, Protocol):
    """Helpers of front doors, which may do themselves what takes little time. Implemented as `Helpers` is."""

    @property
    def idle(self) -> bool:
        """Whether a helper would run a task at once, beside a busy kernel and a busy worker: no task runs, a helper
        has started, and there are processors enough."""

    @property
    def ready(self) -> bool:
        """Whether a helper has started: until then a task waits for that, some 0.1 s and more on a busy machine."""

    def start_ahead(self) -> None:
        """Start helpers if none was started yet: the first tasks need not wait for that."""


class RegionAccess(Protocol):
    """Reads and writes regions of clients in another process. Implemented by the helpers of the server."""

    async def read(self, span: Span) -> Span:
        """Return a copy of the bytes of `span`, in an arena. The caller releases its lease. Raises `ServingError`."""

    async def write(self, data: Buffer, target: Span) -> None:
        """Write `data` to the beginning of `target`. Raises `ServingError`."""


class TaskResult(msgspec.Struct):
    """What a task function returns: a message for the front door, and bytes that go into shared memory."""

    message: bytes = b""
    output: Sequence[Buffer] = ()


#: A task function is a generator function of the arguments and the bytes of the sources. It may yield once, a message,
#: and gets writable memory. It returns the result, or raises `ServingError`.
TaskSteps = Generator[bytes, memoryview, TaskResult]


class TaskFunction(Protocol):
    """A function that a helper runs."""

    def __call__(self, arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps: ...


class NoHelpers:
    """Stands for the helpers until the server has set them. A started task is a bug."""

    idle = ready = False

    def start_ahead(self) -> None:
        """Do nothing."""

    def add(self, task: HelperTask) -> None:
        raise AssertionError(f"task {task.name} was started without helpers")

    def cancel(self, task: HelperTask) -> None:
        raise AssertionError(f"task {task.name} was never started")

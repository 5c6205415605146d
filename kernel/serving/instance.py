"""One instance of a model, as the kernel sees it, and the batches that it has. Pure."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kernel.serving.batch import Batch
    from kernel.serving.request import Request


class Instance(Protocol):
    """One model instance that can execute. Implemented by `backends.supervision.handle.WorkerHandle`."""

    @property
    def name(self) -> str: ...

    @property
    def record(self) -> BatchRecord:
        """The unfinished batches of the instance. `InstanceSet` adds batches; the instance removes finished ones."""

    def execute(self, batch: Batch) -> None:
        """Execute `batch` after earlier batches. The instance owns its requests from now on.

        Never raises: the requests get errors as responses. The instance calls `InstanceSet.executed` when a batch is
        finished, or `InstanceSet.lost`.
        """

    def cancel(self, request: Request) -> None:
        """Let the model know that the client of a dispatched request has disconnected."""

    def consumed(self, request: Request, count: int) -> None:
        """Let the model send `count` more responses of a decoupled request."""

    def send_now(self) -> None:
        """Send the worker its messages now, and not at the end of the event-loop iteration, where they share a send."""

    def end_sequence(self, slot: int) -> None:
        """Free the implicit state of the sequence in `slot`, which is over."""


class BatchRecord:
    """The batches that were dispatched to an instance and are not finished. There is no other record of them.

    An instance with concurrency 1 executes batches in the order of dispatch, and its first batch counts as started. An
    instance with a higher concurrency reports the start of each batch.
    """

    __slots__ = ("_last_number", "_started", "batches", "concurrency", "device_id", "host", "overlaps")

    def __init__(self, concurrency: int = 1, *, overlaps: bool = False) -> None:
        #: How many batches the instance executes at the same time.
        self.concurrency = concurrency
        #: Whether the instance copies the inputs of a batch to its GPU while it computes the one before.
        self.overlaps = overlaps
        #: The number of the GPU that executes them; 0 for an instance without one.
        self.device_id = 0
        #: The host that executes them; "" for the machine of the server.
        self.host = ""
        #: By `Batch.number`, in the order of dispatch.
        self.batches: dict[int, Batch] = {}
        self._started: set[int] = set()
        self._last_number = 0

    def add(self, batch: Batch) -> None:
        """Add a dispatched batch and give it its number."""
        self._last_number = batch.number = self._last_number + 1
        self.batches[batch.number] = batch

    def started(self, number: int) -> None:
        """The instance has begun to execute a batch. Raises KeyError for one that it does not have, or without
        concurrency, where nothing is said of that."""
        if self.concurrency == 1:
            raise KeyError(number)
        self._started.add(self.batches[number].number)

    def executing(self, number: int) -> Batch:
        """Return a batch that is about to finish. Raises KeyError for a batch that is not started."""
        if number not in self._started if self.concurrency > 1 else number != next(iter(self.batches), None):
            raise KeyError(number)
        return self.batches[number]

    def executed(self, number: int) -> Batch:
        """Remove and return a finished batch. Raises KeyError for a batch that is not started."""
        if self.concurrency == 1:
            if number != next(iter(self.batches), None):
                raise KeyError(number)
        else:
            self._started.remove(number)
        return self.batches.pop(number)

    def unstarted(self) -> list[Batch]:
        """Return the batches that the instance has not started, in the order of dispatch."""
        if self.concurrency == 1:
            return list(islice(self.batches.values(), 1, None))
        return [batch for number, batch in self.batches.items() if number not in self._started]

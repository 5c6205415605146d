"""A batch: the requests that one instance executes together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.observe.execution_reports import ExecutionTimes, ReportedExecution, ReportedRequest
    from kernel.serving.request import Request


class Batch(msgspec.Struct, eq=False):
    """Requests for one instance, which sends exactly one final response to each of them.

    An entry without a request is padding, and no response follows. Sequence batching uses padding for slots without a
    request: the worker makes a row for them.
    """

    #: The requests, in the order of their rows.
    entries: list[Request | None]
    #: Whether a request was removed; in a batch of sequences entries may be without a request in any case.
    padded: bool = False
    #: The slot of each entry, by which the worker keeps implicit state; None in a batch without sequences.
    slots: list[int] | None = None
    #: The rows of requests that the model has given back, to execute them again. They are not entries any more.
    rescheduled_rows: int = 0
    #: Why the batch did not wait for more requests: it is `full` or has a `preferred size`, the queue `delay` is over,
    #: an `idle instance` could take all that waited, it has one request of each of some `sequences`, or a request is
    #: `alone` because its model does not batch.
    closed_by: str = "alone"
    #: Whether a request is traced. Set by the instance.
    traced: bool = False
    #: Whether a trace has to be notified of the end of the execution. If none has, they find `times` here.
    notifies_traces: bool = False
    #: When the batch was executed, if a request is traced. Set by the instance.
    times: ExecutionTimes | None = None
    #: Unique among the batches of the instance. Set by `InstanceSet.dispatch`.
    number: int = 0
    #: The number of the first entry in messages to the worker; the other entries have the next numbers. Set by the
    #: instance.
    first_request_number: int = 0
    #: The name of the instance that has executed the batch. Set by `InstanceSet.executed`.
    instance: str = ""
    #: What the backend has reported about the batch; None if it is counted as the worker has measured it.
    reports: BatchReports | None = None

    @property
    def requests(self) -> list[Request]:
        """The requests, without padding."""
        if self.slots is None and not self.padded:  # usual
            return self.entries  # type: ignore[return-value]  # no entry is None without padding and slots
        return [request for request in self.entries if request is not None]

    def remove(self, request: Request) -> None:
        """Remove a request that will not be executed; its entry becomes padding."""
        self.entries[self.entries.index(request)] = None
        self.padded = True

    def reschedule(self, request: Request) -> None:
        """Remove a request that was executed and is to be executed again."""
        self.remove(request)
        self.rescheduled_rows += request.batch_size

    def request_numbers(self) -> Sequence[int]:
        """Return the numbers of the requests in messages to the worker, without padding."""
        numbers = range(self.first_request_number, self.first_request_number + len(self.entries))
        if self.slots is None and not self.padded:
            return numbers
        return [number for number, request in zip(numbers, self.entries, strict=True) if request is not None]


class BatchReports(msgspec.Struct):
    """What a backend has reported about a batch and its requests; what is missing is measured."""

    requests: dict[Request, ReportedRequest] = {}
    executions: list[ReportedExecution] = []


class BegunBatch(msgspec.Struct):
    """A batch that a worker had begun when it was lost."""

    #: The requests without a final response.
    requests: list[Request]
    #: Whether nothing of it can have been noticed outside of the worker: no response was sent, no model was called, and
    #: it belongs to no sequence.
    unseen: bool

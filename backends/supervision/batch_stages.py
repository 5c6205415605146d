"""How far a worker is with the batches that it was sent, and which pieces of its work can stop making progress. Pure.

The kernel knows it from the record of batches, from the outbox (`backends.transport.outbox.Progress`), and from the
responses that have come.

Takes the requests out of a lost worker that its model may execute again (`naiad.isolate_poison`), and says which do no
harm when they are executed by another host.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from backends.transport.wire import CREDIT_WINDOW
from kernel.serving.batch import BegunBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from backends.transport.outbox import Progress
    from kernel.serving.batch import Batch
    from kernel.serving.instance import BatchRecord
    from kernel.serving.poison import PoisonGuard
    from kernel.serving.request import Request


class Stage(enum.Enum):
    """How far a lost worker was with a batch. The value is for the errors of the batch's requests."""

    #: The worker had not begun with the batch: another one can execute it.
    UNTOUCHED = "before it began with the request"
    #: The worker read the batch, perhaps a region of a client, and was lost by that.
    READ = "while it read the request, which had not reached the model"
    IN_MODEL = "while it executed the request"
    #: The worker shares no memory with the kernel, so that it cannot be known without a message for each batch.
    UNKNOWN = "while it had the request, which may have reached the model"


def batch_stages(
    record: BatchRecord, progress: Progress | None, last_sent: int, *, unreachable: bool = False
) -> list[tuple[Batch, Stage]]:
    """Return the unfinished batches of a lost worker, in the order of dispatch, with their stages.

    `last_sent` is the number of the last batch that was sent to the worker, for a worker without `progress`.
    One that is `unreachable` may have begun with any batch that was sent: its last messages may be lost.
    """
    if unreachable:
        return [
            (batch, Stage.UNTOUCHED if number > last_sent else Stage.UNKNOWN)
            for number, batch in record.batches.items()
        ]
    unstarted = record.unstarted()
    if record.concurrency > 1:
        return [(batch, Stage.UNTOUCHED if batch in unstarted else Stage.IN_MODEL) for batch in record.batches.values()]
    if progress is None:
        return [
            (batch, Stage.UNTOUCHED if batch in unstarted or number > last_sent else Stage.UNKNOWN)
            for number, batch in record.batches.items()
        ]
    return [(batch, _stage(number, progress)) for number, batch in record.batches.items()]


def _stage(number: int, progress: Progress) -> Stage:
    if number > progress.batch:
        return Stage.UNTOUCHED
    return Stage.READ if number == progress.batch and not progress.in_model else Stage.IN_MODEL


def work_marks(
    record: BatchRecord,
    requests: Mapping[int, Request],
    granted: Mapping[int, int],
    progress: Progress | None,
    *,
    decoupled: bool,
) -> list[Hashable]:
    """Return a mark for each piece of work that an instance has begun or should have begun.

    The same mark at two times means that this piece made no progress in between. `requests` are those without a final
    response, `granted` the responses for which the worker got credit, both by request number.

    A piece is a batch that is executed, or a request whose response is to follow its batch. A decoupled model is one
    piece: it has no progress when no response comes and no batch begins or ends. It has no mark while it waits for
    clients that do not take its responses.
    """
    if not record.batches and not requests:  # usual
        return []
    if record.concurrency > 1:
        progress = None  # it is the progress of the last batch, and says nothing of the others
    unstarted = record.unstarted()
    executing = [batch for batch in record.batches.values() if batch not in unstarted]
    waiting = {number for batch in unstarted for number in batch.request_numbers()}
    begun = {number: request for number, request in requests.items() if number not in waiting}
    if decoupled:
        return _marks_of_streams(executing, begun, granted, progress, one_thread=record.concurrency == 1)
    in_batches = {number for batch in executing for number in batch.request_numbers()}
    return [
        *((batch.number, progress) for batch in executing),
        *(("request", number) for number in begun if number not in in_batches),
    ]


def _marks_of_streams(
    executing: list[Batch],
    begun: Mapping[int, Request],
    granted: Mapping[int, int],
    progress: Progress | None,
    *,
    one_thread: bool,
) -> list[Hashable]:
    blocked = {
        number
        for number, request in begun.items()
        if request.response_count - granted.get(number, 0) >= CREDIT_WINDOW and not request.cancelled
    }
    if executing and one_thread:
        # The thread that executes a batch waits while one of its requests may not respond.
        if any(number in blocked for batch in executing for number in batch.request_numbers()):
            return []
    elif len(blocked) == len(begun):
        return []
    responses = sum(request.response_count for request in begun.values())
    return [(*(batch.number for batch in executing), progress, responses, len(begun))]


def is_harmless(request: Request, batch: Batch, has_called: Callable[[Request], bool]) -> bool:
    """Whether to execute a request once more does no harm, after its host was lost while it perhaps was executed.

    Only once: no worker was lost with it before.
    """
    return (
        batch.slots is None
        and not (request.lost_before_start or request.sequence or request.response_count or request.finished)
        and not has_called(request)
    )


def take_suspects(
    poison: PoisonGuard,
    unfinished: Iterable[tuple[Batch, Stage]],
    requests: dict[int, Request],
    has_called: Callable[[Request], bool],
) -> list[Request]:
    """Return the requests to execute again, each alone. They are removed from `requests`, the worker's by number."""
    begun: list[BegunBatch] = []
    numbers: dict[Request, int] = {}
    for batch, stage in unfinished:
        if stage is Stage.UNTOUCHED:
            continue
        found = {number: requests[number] for number in batch.request_numbers() if number in requests}
        living = [request for request in found.values() if not request.finished]
        unseen = (
            len(living) == len(batch.request_numbers())
            and batch.slots is None
            and not any(request.response_count or request.sequence or has_called(request) for request in living)
        )
        numbers.update((request, number) for number, request in found.items())
        begun.append(BegunBatch(living, unseen))
    again = poison.judge(begun) if begun else []
    for request in again:
        del requests[numbers[request]]
        request.in_use = False
    return again

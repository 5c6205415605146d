"""A laboratory with the sequence scheduler, for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel.config.spec import SequenceBatching
from kernel.testing import Lab, RecordingSink, model_spec
from schedulers.sequence import sequence

if TYPE_CHECKING:
    from kernel.serving.request import Request

MS = 1_000_000
#: The idle time of the sequences.
IDLE_NS = 1000 * MS


def sequence_lab(
    instances: int = 1, *, slots: int = 4, dims: tuple[int, ...] = (1,), oldest: bool = False, **more: Any
) -> Lab:
    batching = SequenceBatching(slot_count=slots, oldest=oldest, max_idle_ns=IDLE_NS, **more)
    return Lab(model_spec(max_batch_size=4, dims=dims, sequence_batching=batching), sequence, instances)


def rows(lab: Lab, worker: int = 0) -> list[str | None]:
    """Return the ids of the requests in the batch of an instance, by row; None for padding."""
    lab.clock.end_iteration()
    batches = lab.workers[worker].batches
    return [None if request is None else request.id for request in batches[0].entries] if batches else []


def finish(lab: Lab, worker: int = 0) -> None:
    """Let an instance finish its batch, and the iteration end."""
    lab.finish(worker)
    lab.clock.end_iteration()


def errors(request: Request) -> list[str]:
    assert isinstance(request.sink, RecordingSink)
    return [type(error).__name__ for error in request.sink.errors]


def texts(request: Request) -> list[str]:
    assert isinstance(request.sink, RecordingSink)
    return [error.message for error in request.sink.errors]


def answered(request: Request) -> bool:
    """Whether the request has its final response, without an error."""
    return request.finished and not errors(request)

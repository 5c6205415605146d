"""Takes the requests out of a lost worker that its model may execute again (`naiad.isolate_poison`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.supervision.watch.batch_stages import Stage
from kernel.serving.batch import BegunBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.serving.batch import Batch
    from kernel.serving.model import PoisonJudge
    from kernel.serving.request import Request


def take_suspects(
    poison: PoisonJudge,
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

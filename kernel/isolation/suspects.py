"""Which requests of a lost worker are executed again, each alone, and which of them has ended the worker. Pure.

A worker that dies takes the batch with it that it executes: each request of it is a *suspect*. Suspects are executed
again, one at a time. One that is alone in its worker when that dies as well is the *culprit*. So a single
worker that is killed from outside makes no request a culprit: two must die with the same request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.batch import BegunBatch
    from kernel.serving.request import Request

#: With how many workers a request may be lost: batches at the same time can hide the culprit, but not for ever.
MOST_LOSSES = 4


class Judgement(msgspec.Struct):
    """What becomes of the requests of a lost worker. Those that are in neither fail."""

    again: list[Request]
    culprit: Request | None = None


def judge(batches: Sequence[BegunBatch]) -> Judgement:
    """Decide about the batches that a lost worker had begun. Counts the loss in each request."""
    for batch in batches:
        for request in batch.requests:
            request.suspected += 1
    if len(batches) == 1 and len(batches[0].requests) == 1 and batches[0].unseen:
        [request] = batches[0].requests
        if request.suspected > 1:  # before, it was lost with another worker, and has been alone since
            return Judgement([], request)
    return Judgement(
        [
            request
            for batch in batches
            if batch.unseen
            for request in batch.requests
            if request.suspected < MOST_LOSSES and not request.cancelled
        ]
    )

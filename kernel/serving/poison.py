"""Requests that end the worker of their model: found, remembered, and refused when they come again.

Only for models whose configuration says that an execution may be repeated (`naiad.isolate_poison`).

A worker that dies takes the batch with it that it executes: each request of it is a *suspect*. Suspects are executed
again, one at a time. One that is alone in its worker when that dies as well is the *culprit*. So a single worker that
is killed from outside makes no request a culprit: two must die with the same request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import PoisonRequest
from kernel.observe.limited_log import LimitedLog
from kernel.serving.request_key import describe, digest, inputs_in_order
from shm.region import RegionKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.serving.batch import BegunBatch
    from kernel.serving.model import Model
    from kernel.serving.request import Request, WantedInference
    from shm.tensor import Buffer

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


_found = LimitedLog(logging.getLogger(__name__))

#: How many requests of a model version are remembered; of more, the oldest are forgotten.
MOST_REMEMBERED = 64

#: The most bytes of inputs of a request that is remembered: to compute a digest of them takes 2 ms.
MOST_BYTES = 2 << 20


class PoisonExtension:
    """Gives a `PoisonGuard` to the models that ask for it. A `kernel.serving.model.ModelExtension`."""

    async def extend(self, model: Model, folder: Path) -> None:
        spec = model.spec
        if spec.isolates_poison and not (spec.decoupled or spec.sequence_batching or spec.ensemble):
            model.poison = PoisonGuard(spec.name)


class PoisonGuard:
    """The requests of one model version that have ended a worker. A reload makes a new one."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        #: Digest → form, the oldest first; and how many have the same form: names, datatypes, shapes and sizes.
        self._remembered: OrderedDict[bytes, bytes] = OrderedDict()
        self._forms: dict[bytes, int] = {}
        #: How many requests were found, and how many were refused, for the metrics.
        self.found_count = self.refused_count = 0

    @property
    def remembers(self) -> bool:
        """Whether a request can be refused."""
        return bool(self._remembered)

    def __len__(self) -> int:
        """Return how many requests are remembered."""
        return len(self._remembered)

    def check(self, request: Request) -> None:
        """Raise `PoisonRequest` for a request that equals one that has ended a worker, whatever its id."""
        form = _form(request)
        if form not in self._forms:
            return
        found = _digest(request, form)
        if found is not None and found in self._remembered:
            self.refused_count += 1
            raise PoisonRequest(self._model_name)

    def judge(self, batches: Sequence[BegunBatch]) -> list[Request]:
        """Return the requests of a lost worker that are executed again. Remembers the one that has ended it."""
        judgement = judge(batches)
        culprit = judgement.culprit
        if culprit is not None:
            self.found_count += 1
            remembered = self._remember(culprit)
            _found.log(
                f"model '{self._model_name}'",
                "a request has ended two workers of model '%s', the second time alone; %s",
                self._model_name,
                "equal requests are refused from now on" if remembered else "it cannot be remembered",
            )
        return judgement.again

    def clear(self) -> int:
        """Forget all requests; returns how many."""
        count = len(self._remembered)
        self._remembered.clear()
        self._forms.clear()
        return count

    def _remember(self, request: Request) -> bool:
        form = _form(request)
        found = _digest(request, form)
        if found is None:
            return False
        if found not in self._remembered:
            self._remembered[found] = form
            self._forms[form] = self._forms.get(form, 0) + 1
            if len(self._remembered) > MOST_REMEMBERED:
                _, oldest = self._remembered.popitem(last=False)
                self._forms[oldest] -= 1
                if not self._forms[oldest]:
                    del self._forms[oldest]
        return True


def _form(request: WantedInference) -> bytes:
    return describe(request, b"")


def _digest(request: WantedInference, form: bytes) -> bytes | None:
    """Return the digest of a request; None if it is too large, or its bytes are not the server's.

    What a client has in its own region may change at any time, and is never read here.
    """
    if any(output.client_span is not None for output in request.outputs):
        return None
    contents: list[Buffer] = []
    byte_size = 0
    for tensor in inputs_in_order(request):
        byte_size += tensor.byte_size
        if tensor.client_span is not None or byte_size > MOST_BYTES:
            return None
        if tensor.span is None:
            contents.append(tensor.data or b"")
        elif tensor.span.lease.region.kind is not RegionKind.ARENA or tensor.span.lease.region.of_client:
            return None
        else:
            contents.append(tensor.span.lease.region.view(tensor.span.offset, tensor.span.byte_size))
    return digest(form, contents)

"""Has new instances of a model execute its warm-up, before they take requests.

Around the scheduler, which might join the requests, or give them all to one instance.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from kernel.errors import InternalError
from kernel.repository.warmup import warmup_samples
from kernel.serving.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.loop.clock import Clock
    from kernel.repository.source import ModelSource
    from kernel.repository.warmup import WarmupSample
    from kernel.serving.instances import Instance
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Response


async def warm_up(
    model: Model, instances: Sequence[Instance], source: ModelSource, clock: Clock, limit_s: float = 0
) -> None:
    """Have every one of `instances`, which are apart, execute the samples. Raises `ServingError`.

    All together may take `limit_s` seconds, 0 for no limit; what is executing then goes on.
    """
    if not model.config.model_warmup or not instances:
        return
    files = await asyncio.to_thread(source.read_warmup_files, model.config)
    samples = warmup_samples(model.config, model.spec, files, random.Random())
    try:
        async with asyncio.timeout(limit_s or None):
            for sample in samples:
                for _ in range(sample.count):
                    await _run(model, instances, sample, clock)
    except TimeoutError:
        raise InternalError(f"the model's warm-up took longer than {limit_s:g} s") from None


async def _run(model: Model, instances: Sequence[Instance], sample: WarmupSample, clock: Clock) -> None:
    """Have every instance execute `sample` once, all at the same time. Raises `ServingError`."""
    answers = _Answers()
    now_ns = clock.now_ns()
    batches = [Batch([*answers.requests(model, sample, instance, now_ns)]) for instance in instances]
    for instance, batch in zip(instances, batches, strict=True):
        model.instances.dispatch_apart(instance, batch)
    await answers.all_final()
    if answers.errors:
        raise sample.failed(answers.errors)


class _Answers:
    """Collects the responses of warm-up requests; only their errors matter."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._open = 0
        self._done = asyncio.get_running_loop().create_future()

    def requests(self, model: Model, sample: WarmupSample, instance: Instance, now_ns: int) -> list[Request]:
        """Return the requests of one batch for `instance`, whose responses come here."""
        made = []
        for _ in range(sample.batch_size):
            sink = _WarmupSink(self, instance)
            sink.request = sample.request(model.name, sink)
            sink.request.owner = sink
            sink.request.received_ns = sink.request.queue_start_ns = now_ns
            made.append(sink.request)
        self._open += len(made)
        return made

    def received(self, response: Response) -> None:
        if response.error is not None:
            self.errors.append(response.error.message)
        if response.final:
            self._open -= 1
            if not self._open and not self._done.done():
                self._done.set_result(None)

    async def all_final(self) -> None:
        await self._done


class _WarmupSink:
    """Sink and owner of a request. It takes every response at once, so that a decoupled model never waits."""

    def __init__(self, answers: _Answers, instance: Instance) -> None:
        self._answers = answers
        self._instance = instance
        self.request: Request | None = None

    def send(self, response: Response) -> None:
        response.release()
        if self.request is not None:
            self.request.failed = self.request.failed or response.error is not None
            self.request.consumed()
        self._answers.received(response)

    # ---- kernel.serving.request.RequestOwner -------------------------------------------------

    def responded(self, request: Request, response: Response) -> None:
        """Warm-up is not counted in the statistics."""

    def consumed(self, request: Request, count: int) -> None:
        self._instance.consumed(request, count)

    def cancelled(self, request: Request) -> None:
        self._instance.cancel(request)

"""Runs a model's warm-up on new instances, before they take requests.

Warm-up requests bypass the scheduler, which could join them or send all of them to one instance.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from kernel.errors import InternalError
from kernel.files.file_threads import in_file_thread
from kernel.repository.warmup import warmup_samples
from kernel.serving.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.loop.clock import Clock
    from kernel.repository.source import ModelSource
    from kernel.repository.warmup import WarmupSample
    from kernel.serving.instance import Instance
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Response


async def warm_up(
    model: Model, instances: Sequence[Instance], source: ModelSource, clock: Clock, limit_s: float = 0
) -> None:
    """Let each of `instances` execute all samples; the scheduler must not use the instances yet.

    Raises `ServingError`, also when all of it takes longer than `limit_s` seconds (0 for no limit). The
    instances then still execute what they were sent.
    """
    if not model.config.model_warmup or not instances:
        return
    files = await in_file_thread(source.read_warmup_files, model.config)
    samples = warmup_samples(model.config, model.spec, files, random.Random())
    try:
        async with asyncio.timeout(limit_s or None):
            for sample in samples:
                for _ in range(sample.count):
                    await _run(model, instances, sample, clock)
    except TimeoutError:
        raise InternalError(f"the model's warm-up took longer than {limit_s:g} s") from None


async def _run(model: Model, instances: Sequence[Instance], sample: WarmupSample, clock: Clock) -> None:
    """Let all instances execute `sample` once, at the same time. Raises `ServingError`."""
    responses = _WarmupResponses()
    now_ns = clock.now_ns()
    batches = [Batch([*responses.requests(model, sample, instance, now_ns)]) for instance in instances]
    for instance, batch in zip(instances, batches, strict=True):
        model.instances.dispatch_apart(instance, batch)
    await responses.all_final()
    if responses.errors:
        raise sample.failed(responses.errors)


class _WarmupResponses:
    """Collects the errors of warm-up responses, and waits for all final responses."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._unfinished_count = 0
        self._done = asyncio.get_running_loop().create_future()

    def requests(self, model: Model, sample: WarmupSample, instance: Instance, now_ns: int) -> list[Request]:
        """Return the requests of one batch for `instance`. Their responses go to `received`."""
        made = []
        for _ in range(sample.batch_size):
            sink = _WarmupSink(self, instance)
            sink.request = sample.request(model.name, sink)
            sink.request.owner = sink
            sink.request.received_ns = sink.request.queue_start_ns = now_ns
            made.append(sink.request)
        self._unfinished_count += len(made)
        return made

    def received(self, response: Response) -> None:
        if response.error is not None:
            self.errors.append(response.error.message)
        if response.final:
            self._unfinished_count -= 1
            if not self._unfinished_count and not self._done.done():
                self._done.set_result(None)

    async def all_final(self) -> None:
        """Wait until each request has its final response."""
        await self._done


class _WarmupSink:
    """Sink and owner of a request. Consumes every response immediately, so that a decoupled model can send the next."""

    peer = ""

    def __init__(self, responses: _WarmupResponses, instance: Instance) -> None:
        self._responses = responses
        self._instance = instance
        self.request: Request | None = None

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        response.release()
        if self.request is not None:
            self.request.failed = self.request.failed or response.error is not None
            self.request.consumed()
        self._responses.received(response)

    # ---- kernel.serving.request.RequestOwner -------------------------------------------------

    def responded(self, request: Request, response: Response) -> None:
        """Do nothing: statistics do not count the warm-up."""

    def consumed(self, request: Request, count: int) -> None:
        self._instance.consumed(request, count)

    def cancelled(self, request: Request) -> None:
        self._instance.cancel(request)

"""Submits the requests of a trial to the kernel, on its event loop, and waits for their responses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from kernel.authoring.trial.configured_outputs import SentOutput
from kernel.embedding.arrays import input_tensor, output_array
from kernel.errors import ServingError
from kernel.serving.request import Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.authoring.trial.arrays import Arrays
    from kernel.config.spec import ModelSpec
    from kernel.serving.kernel import Kernel
    from kernel.serving.response import Response
    from shm.arrays import Array


#: A model that sends more responses to a request is not tried any further: it may never end.
MAX_RESPONSES = 1000


class Responses(msgspec.Struct):
    """What a request got."""

    outputs: list[Arrays] = []
    #: The same as clients would get them.
    sent: list[list[SentOutput]] = []
    #: The error of the last response; empty for none.
    error: str = ""
    #: Whether the request was cancelled, because it did not end.
    endless: bool = False


class _Collector:
    """The sink of a request: copies its outputs and consumes them at once."""

    peer = ""

    def __init__(self) -> None:
        self.responses = Responses()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.request: Request

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        if response.error is not None:
            self.responses.error = response.error.message.strip()
        elif response.outputs is not None:
            self.responses.outputs.append({output.name: output_array(output) for output in response.outputs})
            self.responses.sent.append(
                [SentOutput(output.name, output.datatype, list(output.shape)) for output in response.outputs]
            )
        response.release()
        if len(self.responses.outputs) > MAX_RESPONSES and not self.done.done():
            self.responses.error, self.responses.endless = f"more than {MAX_RESPONSES} responses", True
            self.done.set_result(None)
        if not response.final:
            asyncio.get_running_loop().call_soon(self.request.consumed)
        elif not self.done.done():
            self.done.set_result(None)


async def respond(
    kernel: Kernel, spec: ModelSpec, inputs: Mapping[str, Array], sequence: int, timeout_s: float
) -> Responses:
    """Return the responses of a request with `inputs`. After `timeout_s` seconds it is cancelled, which is its error.

    `sequence` is the correlation id; a sequence model gets a sequence of this one request.
    """
    collector = _Collector()
    tensors = [input_tensor(name, array, _bf16_only(spec, name)) for name, array in inputs.items()]
    request = collector.request = Request(spec.name, tensors, collector, streaming=True)
    if spec.sequence_batching is not None:
        request.correlation_id, request.sequence_start, request.sequence_end = sequence, True, True
    try:
        kernel.submit(request)
        async with asyncio.timeout(timeout_s or None):
            await collector.done
        if collector.responses.endless:
            kernel.cancel(request)
    except ServingError as error:
        collector.responses.error = error.message.strip()
    except TimeoutError:
        kernel.cancel(request)
        collector.responses.error = f"no final response within {timeout_s:g} s"
        collector.responses.endless = True
    return collector.responses


def _bf16_only(spec: ModelSpec, name: str) -> str | None:
    """Return the datatype of an input that arrays cannot have themselves; else None, so that it is checked."""
    return "BF16" if name in spec.inputs and spec.inputs[name].datatype == "BF16" else None

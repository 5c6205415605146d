"""Tries a loaded model: the same requests alone, together and shuffled, which must have the same outputs.

`respond` submits requests to the kernel, on its event loop, and waits for their responses.
"""

from __future__ import annotations

import asyncio
import random as python_random
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kernel.embedding.arrays import input_tensor, output_array
from kernel.errors import ServingError
from kernel.repository.warmup import warmup_samples
from kernel.serving.request import ClientlessSink, Request
from kernel.tools.trial_arrays import (
    VARIABLE_SIZES,
    Arrays,
    SentOutput,
    can_stack,
    departures,
    difference,
    random_inputs,
    row_of,
    stacked,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.config.generated.model_config_pb2 import ModelConfig
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


class _Collector(ClientlessSink):
    """The sink of a request: copies its outputs and consumes them at once."""

    def __init__(self) -> None:
        self.responses = Responses()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.request: Request

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


class TrialSettings(msgspec.Struct, frozen=True):
    """How models are tried."""

    request_count: int = 8
    seed: int = 0
    #: Seconds that a request may take; 0 for no limit.
    timeout_s: float = 60


class TrialResult(msgspec.Struct):
    """What a trial has found."""

    #: ok, breaks (its configuration), differs, varies (from run to run, also alone), or refused (the model takes none
    #: of the inputs).
    verdict: str = "ok"
    #: Where the inputs came from: warm-up, or random with the size of variable dimensions.
    inputs: str = ""
    request_count: int = 0
    #: One line for each thing that an author should know.
    findings: list[str] = []


class _Endless(Exception):
    """A request does not end."""


class Trial:
    """The trial of one model, which must be loaded."""

    def __init__(self, kernel: Kernel, spec: ModelSpec, settings: TrialSettings) -> None:
        self._kernel = kernel
        self._spec = spec
        self._settings = settings
        self._result = TrialResult()
        self._sequence = 0
        self._rounding = ""

    async def run(self, config: ModelConfig, warmup_files: Mapping[str, bytes]) -> TrialResult:
        """Try the model with the requests of its warm-up, or with random ones if it has none."""
        try:
            await self._run(config, warmup_files)
        except _Endless as error:
            self._result.verdict = "refused"
            self._result.findings.append(f"a request does not end: {error}")
        return self._result

    async def _run(self, config: ModelConfig, warmup_files: Mapping[str, bytes]) -> None:
        result = self._result
        requests = self._warmup_requests(config, warmup_files)
        alone: list[Responses] = []
        if requests:
            result.inputs = "warm-up"
            alone = await self._alone(requests)
        else:
            requests, alone = await self._accepted_requests()
        if all(each.error for each in alone):
            result.verdict = "refused"
            why = alone[0].error if alone else "random inputs would be too large"
            advice = (
                ""
                if requests and result.inputs == "warm-up"
                else "; if random inputs do not suit the model, add a model_warmup"
            )
            result.findings.append(f"no request of the trial succeeds: {_first_line(why)}{advice}")
            return
        broken = departures(self._spec, (outputs for each in alone for outputs in each.sent))
        if broken:
            result.verdict = "breaks"
            result.findings += broken
            return
        if not self._same(alone, await self._alone(requests), "a second time alone", verdict="varies"):
            return
        together = await asyncio.gather(*(self._respond(inputs) for inputs in requests))
        self._same(alone, together, "together with others")
        order = list(range(len(requests)))
        python_random.Random(self._settings.seed).shuffle(order)
        shuffled = await asyncio.gather(*(self._respond(requests[index]) for index in order))
        self._same([alone[index] for index in order], shuffled, "in another order")
        await self._rows(requests, alone, list(range(len(requests))), "as rows of one request")
        await self._rows(requests, alone, order, "as rows of one request in another order")
        if self._rounding:
            result.findings.append(f"rounding only: {self._rounding}")

    # ---- requests ----------------------------------------------------------------------------

    def _warmup_requests(self, config: ModelConfig, files: Mapping[str, bytes]) -> list[Arrays]:
        """Return requests from the samples of the warm-up, as many as the settings say; random data is new in each."""
        random = python_random.Random(self._settings.seed)
        requests: list[Arrays] = []
        while config.model_warmup and len(requests) < self._settings.request_count:
            samples = warmup_samples(config, self._spec, files, random)
            if not samples:
                return []
            requests += [
                {tensor.name: output_array(tensor) for tensor in sample.inputs if tensor.name in self._spec.inputs}
                for sample in samples
            ]
        return requests[: self._settings.request_count]

    async def _accepted_requests(self) -> tuple[list[Arrays], list[Responses]]:
        """Return random requests and what each got alone. Sizes of variable dimensions are tried until one succeeds."""
        first: tuple[list[Arrays], list[Responses]] = [], []
        variable = any(-1 in tensor.dims for tensor in self._spec.inputs.values())
        for size in VARIABLE_SIZES if variable else VARIABLE_SIZES[:1]:
            random = np.random.default_rng(self._settings.seed)
            made = [random_inputs(self._spec, size, random) for _ in range(self._settings.request_count)]
            requests = [each for each in made if each is not None]
            if len(requests) < len(made):
                continue
            alone = await self._alone(requests)
            self._result.inputs = f"random, variable dimensions {size}" if variable else "random"
            if not all(each.error for each in alone):
                return requests, alone
            if not first[0]:
                first = requests, alone
        return first

    async def _alone(self, requests: Sequence[Arrays]) -> list[Responses]:
        return [await self._respond(inputs) for inputs in requests]

    async def _respond(self, inputs: Arrays) -> Responses:
        self._sequence += 1
        self._result.request_count += 1
        found = await respond(self._kernel, self._spec, inputs, self._sequence, self._settings.timeout_s)
        if found.endless:
            raise _Endless(found.error)
        return found

    async def _rows(
        self, requests: Sequence[Arrays], alone: Sequence[Responses], order: Sequence[int], how: str
    ) -> None:
        """Execute requests as rows of one request, and compare each row with the request alone."""
        spec = self._spec
        usable = [index for index in order if not alone[index].error and len(alone[index].outputs) == 1]
        chosen = usable[: max(spec.max_batch_size, 0)]
        rows = [requests[index] for index in chosen]
        if len(rows) < 2 or spec.sequence_batching is not None or spec.decoupled or not can_stack(rows):
            return
        found = await self._respond(stacked(rows))
        if found.error or len(found.outputs) != 1:
            self._differs(f"{len(rows)} requests {how}: {_first_line(found.error) or 'no single response'}")
            return
        for name, array in found.outputs[0].items():
            if array.shape[:1] != (len(rows),):
                self._differs(f"{how}: output '{name}' has {list(array.shape)[:1]} rows for {len(rows)} rows of inputs")
                return
        split = [Responses([row_of(found.outputs[0], position)]) for position in range(len(rows))]
        self._same([alone[index] for index in chosen], split, how)

    # ---- comparisons -------------------------------------------------------------------------

    def _same(
        self, expected: Sequence[Responses], found: Sequence[Responses], how: str, *, verdict: str = "differs"
    ) -> bool:
        """Compare what requests got with what they got alone, and note the first difference. Returns whether none."""
        for number, (first, second) in enumerate(zip(expected, found, strict=True), start=1):
            text = self._compare(first, second, how)
            if text:
                self._result.verdict = verdict
                self._result.findings.append(f"request {number} {how}: {text}")
                return False
        return True

    def _compare(self, expected: Responses, found: Responses, how: str) -> str:
        if bool(expected.error) != bool(found.error):
            failed = _first_line(found.error or expected.error)
            return f"fails: {failed}" if found.error else f"succeeds, but alone fails: {failed}"
        if len(expected.outputs) != len(found.outputs):
            return f"{len(found.outputs)} responses instead of {len(expected.outputs)}"
        for first, second in zip(expected.outputs, found.outputs, strict=True):
            differing = difference(first, second)
            if differing is not None and not differing.rounding:
                return differing.text
            if differing is not None:
                self._rounding = f"{how}, {differing.text}"
        return ""

    def _differs(self, text: str) -> None:
        self._result.verdict = "differs"
        self._result.findings.append(text)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]

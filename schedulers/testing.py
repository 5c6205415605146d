"""Doubles for tests of schedulers that submit requests themselves: a kernel with fake models and fake instances.

Public, for authors of such schedulers. For other schedulers `kernel.testing.Lab` is enough.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import EnsembleSpec, EnsembleStep, ModelSpec, TensorSpec
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import InputPlacer
from kernel.observe.execution_reports import ExecutionTimes
from kernel.records.tracer import Tracer
from kernel.serving.catalog import Catalog, ModelState
from kernel.serving.interface import KernelSettings
from kernel.serving.kernel import Kernel
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.settings import LogSettings, TraceSettings
from kernel.testing import FakeClock, FakeInstance, RecordingSink
from schedulers.registry import choose_scheduler
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.errors import ServingError
    from kernel.serving.response import ParameterValue
    from shm.tensor import RequestedOutput


def spec_of(
    name: str,
    inputs: str,
    outputs: str,
    *,
    dims: tuple[int, ...] = (1,),
    max_batch_size: int = 0,
    decoupled: bool = False,
    optional: str = "",
    ensemble: EnsembleSpec | None = None,
) -> ModelSpec:
    """Return the spec of a model with FP32 tensors, whose names are separated by spaces."""
    shape = (-1, *dims) if max_batch_size else dims
    return ModelSpec(
        name=name,
        platform="ensemble" if ensemble is not None else "",
        backend="" if ensemble is not None else "identity",
        max_batch_size=max_batch_size,
        inputs={
            each: TensorSpec(each, "FP32", dims, shape, optional=each in optional.split()) for each in inputs.split()
        },
        outputs={each: TensorSpec(each, "FP32", dims, shape) for each in outputs.split()},
        decoupled=decoupled,
        ensemble=ensemble,
    )


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: str = "") -> EnsembleStep:
    """Return a step: names of the model's tensors → names of the ensemble's tensors."""
    return EnsembleStep(model, version, dict(inputs), dict(outputs))


class Call:
    """A request that a fake model executes."""

    def __init__(self, lab: KernelLab, model: Model, instance: FakeInstance, request: Request) -> None:
        self.model = model
        self.request = request
        self._lab = lab
        self._instance = instance

    @property
    def inputs(self) -> dict[str, list[int]]:
        """The names and shapes of the inputs."""
        return {tensor.name: tensor.shape for tensor in self.request.inputs}

    def respond(
        self,
        *outputs: Tensor,
        final: bool = True,
        parameters: dict[str, ParameterValue] | None = None,
    ) -> None:
        """Send one response. By default it has all outputs of the model, with the shape of the first input."""
        spec = self.model.spec
        first = self.request.inputs[0] if self.request.inputs else Tensor("", "FP32", [1], bytes(4))
        made = list(outputs) or [
            Tensor(name, "FP32", list(first.shape), bytes(first.byte_size)) for name in spec.outputs
        ]
        leased = any(tensor.span is not None for tensor in made)
        self._send(Response(spec.name, "1", self.request.id, made, parameters, None, final, leased), final=final)

    def finish(self) -> None:
        """Send only the final flag."""
        self._send(Response(self.model.spec.name, "1", self.request.id, final=True), final=True)

    def fail(self, error: ServingError) -> None:
        """Send an error as the final response."""
        self._send(Response(self.model.spec.name, "1", self.request.id, error=error), final=True)

    def _send(self, response: Response, *, final: bool) -> None:
        if final:
            self._lab.calls.remove(self)
        self.request.respond(response)
        if final:
            batch = next(batch for batch in self._instance.batches if self.request in batch.requests)
            self._instance.batches.remove(batch)
            self._instance.record.executed(batch.number)
            self.model.instances.executed(self._instance, batch, ExecutionTimes(0, 10, 30, 60))

    @property
    def cancelled(self) -> bool:
        return self.request in self._instance.cancelled


class _ListingInstance(FakeInstance):
    """An instance that shows its requests in the list of the lab. It executes any number at the same time."""

    def __init__(self, lab: KernelLab, model: Model) -> None:
        super().__init__(f"{model.name}_0", concurrency=1 << 20)
        self._lab = lab
        self._model = model
        #: Credit that was given, by request.
        self.credit: dict[Request, int] = {}

    def execute(self, batch: object) -> None:
        super().execute(batch)  # type: ignore[arg-type]  # a batch
        latest = self.batches[-1]
        self.record.started(latest.number)
        for request in latest.requests:
            self._lab.calls.append(Call(self._lab, self._model, self, request))

    def consumed(self, request: Request, count: int) -> None:
        self.credit[request] = self.credit.get(request, 0) + count


class KernelLab:
    """A kernel with models whose instances are fakes, and with ensembles of them. Its clock does not run."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.catalog = Catalog()
        regions = RegionRegistry()
        settings = KernelSettings(trace=TraceSettings(), log=LogSettings())
        tracer = Tracer(settings.trace, self.clock)
        self.kernel = Kernel(self.catalog, regions, InputPlacer(regions, 1 << 20), self.clock, settings, tracer)
        #: The requests that the models execute, oldest first.
        self.calls: list[Call] = []
        self.instances: dict[str, _ListingInstance] = {}

    def add(self, spec: ModelSpec, version: int = 1) -> Model:
        """Add a model version, or an ensemble, that is ready."""
        schedule = functools.partial(choose_scheduler, caller=self.kernel)
        model = Model(spec, ModelConfig(name=spec.name), version, schedule, self.clock)
        model.start()
        if spec.ensemble is None:
            self.instances[spec.name] = instance = _ListingInstance(self, model)
            model.instances.add(instance)
        self.catalog.set_state(spec.name, version, ModelState.READY, model=model)
        return model

    def submit(
        self,
        model: str,
        *inputs: str | Tensor,
        id: str = "",
        outputs: Sequence[RequestedOutput] = (),
        shape: tuple[int, ...] = (1,),
        streaming: bool = False,
    ) -> tuple[Request, RecordingSink]:
        """Submit a request; inputs that are only names get zeros of `shape`."""
        sink = RecordingSink()
        size = 4
        for dim in shape:
            size *= dim
        tensors = [Tensor(each, "FP32", list(shape), bytes(size)) if isinstance(each, str) else each for each in inputs]
        request = Request(model, tensors, sink, id=id, outputs=list(outputs), streaming=streaming)
        request.leased = any(output.span is not None for output in outputs)
        self.kernel.submit(request)
        return request, sink

    def call(self, model: str) -> Call:
        """Return the oldest call of a model."""
        return next(call for call in self.calls if call.model.name == model)

    @property
    def running(self) -> list[str]:
        """The names of the models that execute a request, oldest first, one for each request."""
        return [call.model.name for call in self.calls]

    def check(self) -> None:
        """Recompute the invariants of all models."""
        self.kernel.check()

"""One request to an ensemble while its steps are executed: makes the requests of the steps, and the responses.

Shapes change between models with and without batching, and between an ensemble and its steps; the bytes of a tensor are
the same. The rule is Triton's (`ReshapeTensorDims` in core's ensemble_scheduler.cc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.serving.validation import fits
from schedulers.ensemble.progress import EnsembleProgress, Placed, SequenceValues
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kernel.config.spec import TensorSpec
    from kernel.errors import ServingError
    from kernel.serving.model import Model
    from kernel.serving.response import ParameterValue, Sink
    from schedulers.ensemble.plan import EnsemblePlan, OutputsOnDevices
    from schedulers.ensemble.progress import StepCall


class Run:
    """A request to the ensemble that has no final response yet."""

    def __init__(
        self,
        plan: EnsemblePlan,
        request: Request,
        models: tuple[Model, ...],
        started_ns: int,
        prepaid: Collection[int] = (),
        on_devices: OutputsOnDevices | None = None,
    ) -> None:
        """`models` are the versions of the steps, which the request has pinned; `prepaid` are the steps that get their
        credit at once; `on_devices` says which outputs stay on a device. Raises `InvalidArgument`.
        """
        self._prepaid = prepaid
        self.request = request
        self.models = models
        self.started_ns = started_ns
        self.route = plan.route(request.outputs)
        self._asked = plan.asked if on_devices is None else on_devices.asked(self.route, request.outputs)
        sender = None
        if plan.spec.decoupled:
            sender = plan.sender(self.route, [step for step, model in enumerate(models) if model.spec.decoupled])
        self.progress = EnsembleProgress(plan, self.route, sender)
        #: Requests of steps without a final response.
        self.calls: dict[Request, StepCall] = {}
        #: Calls that wait because their steps execute as many as they may.
        self.waiting: dict[StepCall, None] = {}
        #: Why the request fails as soon as no call is in flight.
        self.error: ServingError | None = None
        self._plan = plan
        self._batched = plan.spec.max_batch_size > 0
        self._sequence = SequenceValues(request.correlation_id, request.sequence_start, request.sequence_end)
        #: Outputs that the last response does not have, because a step did not make them.
        self.left_out: tuple[str, ...] = ()
        #: Requested outputs that are not simply a part of the response, by tensor.
        self._destinations = self._find_destinations(request.outputs)

    def _find_destinations(self, outputs: Iterable[RequestedOutput]) -> dict[str, list[RequestedOutput]]:
        found: dict[str, list[RequestedOutput]] = {}
        for output in outputs:
            if output.span is None and not output.classification:
                continue
            if output.name not in self._plan.writers:
                raise InvalidArgument(
                    f"output '{output.name}' of ensemble '{self._plan.spec.name}' is one of its inputs, which can "
                    "neither be written to shared memory nor classified"
                )
            found.setdefault(output.name, []).append(output)
        return found

    # ---- requests of steps -------------------------------------------------------------------

    def begin(self) -> list[StepCall]:
        """Take over the inputs of the request. Returns the calls that can start."""
        inputs: dict[str, Placed | None] = {}
        for tensor in self.request.inputs:
            shape, spec = tensor.shape, self._plan.spec.inputs[tensor.name]
            if spec.reshape is not None:
                shape = inside(shape, spec, batched=self._batched)
            inputs[tensor.name] = Placed(Tensor("", tensor.datatype, shape, tensor.data, tensor.span), self._batched)
        self.request.inputs = []  # each input is freed when the last step has read it
        return self.progress.begin(inputs)

    def request_of(self, call: StepCall, sink: Sink) -> Request:
        """Return the request of a call, which owns the leases of its inputs."""
        parent, model = self.request, self.models[call.step]
        call.decoupled = model.spec.decoupled
        call.prepaid = call.step in self._prepaid
        batching = model.spec.max_batch_size > 0
        sequence = self._sequence
        inputs: list[Tensor] = []
        leased = False
        for name, placed in self.progress.inputs_of(call):
            given = placed.tensor
            shape = given.shape
            if placed.batched is not batching and name in model.spec.inputs:
                shape = bridged(shape, batched=placed.batched, dims=model.spec.inputs[name].dims, batching=batching)
            inputs.append(Tensor(name, given.datatype, shape, given.data, given.span))
            leased = leased or given.span is not None
            sequence = placed.sequence or sequence
        step = self._plan.steps[call.step]
        outputs = self._asked[call.step]
        if self._destinations:
            outputs = self._requested_outputs_of(call)
            leased = leased or any(output.span is not None for output in outputs)
        return Request(
            step.model_name,
            inputs,
            sink,
            step.model_version,
            parent.id,
            outputs,
            parent.parameters,
            sequence.correlation_id,
            sequence.start,
            sequence.end,
            parent.priority,
            parent.timeout_us,
            streaming=True,
            parent=parent,
            trace_parent=parent,
            leased=leased,
        )

    def _requested_outputs_of(self, call: StepCall) -> list[RequestedOutput]:
        """Return the outputs of a step with the places and classes that the client asks for.

        An output has two entries if a step reads it as well: first the client's, then one for the response.
        """
        asked: list[RequestedOutput] = []
        for plain in self._asked[call.step]:
            name, tensor = plain.name, self._plan.steps[call.step].outputs[plain.name]
            wanted = self._destinations.get(tensor, ())
            spec = self._plan.spec.outputs.get(tensor)
            for output in wanted:
                labels = output.labels
                if labels is None and spec is not None and spec.label_filename:
                    labels = list(spec.labels)  # else the labels of the step's model, as in Triton
                batched = self._batched if output.batched is None else output.batched
                span = None if output.span is None else output.span.shared()
                asked.append(RequestedOutput(name, output.classification, span, None, labels, batched))
            if not wanted or self._is_read(tensor):
                asked.append(plain)
        return asked

    def _is_read(self, tensor: str) -> bool:
        """Whether the tensor itself is needed, beside what the client asks of it."""
        return tensor in self.route.readers or any(
            output.name == tensor and output.span is None and not output.classification
            for output in self.request.outputs
        )

    # ---- responses ---------------------------------------------------------------------------

    def outputs_of(self, call: StepCall, response: Response) -> dict[str, Placed]:
        """Return the tensors of a step's response by their names in the ensemble. Takes over the response's leases."""
        batched = self.models[call.step].spec.max_batch_size > 0
        names = self._plan.steps[call.step].outputs
        sequence = _sequence_of(response.parameters, self._sequence) if response.parameters else None
        found: dict[str, Placed] = {}
        response.leased = False
        for tensor in response.outputs or ():
            name = names.get(tensor.name)
            if name is None or (name in found and not self._destinations):  # a model may name one twice
                tensor.release()
            elif not self._destinations:
                found[name] = Placed(tensor, batched, sequence)
            else:
                self._sort(name, tensor, found, batched, sequence)
        return found

    def _sort(
        self, name: str, tensor: Tensor, found: dict[str, Placed], batched: bool, sequence: SequenceValues | None
    ) -> None:
        """Add an output of a step, which comes once for each destination, in the order of `_requested_outputs_of`."""
        wanted = self._destinations.get(name, ())
        placed = found.get(name)
        if placed is None:
            # Until the tensor itself comes, if it was asked for: what nobody reads needs no bytes.
            empty = Tensor("", tensor.datatype, tensor.shape, b"")
            placed = found[name] = Placed(empty, batched, sequence, [])
        if len(placed.for_client) < len(wanted):
            placed.for_client.append((tensor, wanted[len(placed.for_client)].classification > 0))
        else:
            placed.tensor.release()
            placed.tensor = tensor

    def next_response(self, version_text: str) -> Response | None:
        """Return the next response of the ensemble if all its outputs are there, or None."""
        outputs = self.progress.next_outputs()
        if outputs is None:
            return None
        if len(outputs) < len(self.route.outputs):
            found = {name for name, _ in outputs}
            self.left_out = tuple(name for name in self.route.outputs if name not in found)
        spec = self._plan.spec
        sequence = self._sequence
        tensors: list[Tensor] = []
        leased = False
        for name, placed in outputs:
            sequence = placed.sequence or sequence
            wanted = spec.outputs[name]
            if not self._destinations and wanted.reshape is None and placed.batched is self._batched:  # usual
                given = placed.tensor
                tensors.append(Tensor(name, given.datatype, given.shape, given.data, given.span))
                leased = leased or given.span is not None
                continue
            for given, classified in self._for_client(name, placed):
                shape = given.shape if classified else self._client_shape(given.shape, placed, wanted)
                tensors.append(Tensor(name, given.datatype, shape, given.data, given.span))
                leased = leased or given.span is not None
        parameters: dict[str, ParameterValue] | None = None
        if tensors:  # as in Triton
            parameters = {
                "sequence_id": sequence.correlation_id,
                "sequence_start": sequence.start,
                "sequence_end": sequence.end,
            }
        request = self.request
        return Response(spec.name, version_text, request.id, tensors, parameters, None, False, leased)

    def _for_client(self, name: str, placed: Placed) -> list[tuple[Tensor, bool]]:
        """Return what the client gets of an output, and whether it has classes."""
        if name not in self._destinations:
            return [(placed.tensor, False)]
        if any(o.name == name and o.span is None and not o.classification for o in self.request.outputs):
            return [*placed.for_client, (placed.tensor, False)]
        placed.tensor.release()
        return placed.for_client

    def _client_shape(self, shape: list[int], placed: Placed, wanted: TensorSpec) -> list[int]:
        if placed.batched is not self._batched:
            dims = wanted.dims if wanted.reshape is None else wanted.reshape
            shape = bridged(shape, batched=placed.batched, dims=dims, batching=self._batched)
        return outside(shape, wanted, batched=self._batched)


def _sequence_of(parameters: dict[str, ParameterValue], before: SequenceValues) -> SequenceValues | None:
    """Return what a response says of its sequence, for the steps that read its outputs; None if it says nothing."""
    found = before
    correlation_id = parameters.get("sequence_id")
    if isinstance(correlation_id, (int, str)) and not isinstance(correlation_id, bool):
        found = SequenceValues(correlation_id, found.start, found.end)
    start, end = parameters.get("sequence_start"), parameters.get("sequence_end")
    if isinstance(start, bool):
        found = SequenceValues(found.correlation_id, start, found.end)
    if isinstance(end, bool):
        found = SequenceValues(found.correlation_id, found.start, end)
    return None if found is before else found


def bridged(shape: list[int], *, batched: bool, dims: Sequence[int], batching: bool) -> list[int]:
    """Return the shape in which a consumer gets a tensor that was made with a batch dimension if `batched`.

    The consumer takes `dims`, after a batch dimension if `batching`.
    """
    if batched is batching:
        return shape
    if batching:
        # A model without batching made the tensor: either one row, or all rows as a part of its own dimensions.
        return [1, *shape] if fits(shape, dims) else shape
    if not fits(shape, dims) and shape and shape[0] == 1:
        return shape[1:]
    return shape


def inside(shape: list[int], spec: TensorSpec, *, batched: bool) -> list[int]:
    """Return the shape that the steps see of an input of the ensemble; it differs if the input has a `reshape`."""
    if spec.reshape is None:
        return shape
    return _converted(shape, spec.dims, spec.reshape, batched=batched)


def outside(shape: list[int], spec: TensorSpec, *, batched: bool) -> list[int]:
    """Return the shape that clients see of an output of the ensemble, the inverse of `inside`."""
    if spec.reshape is None:
        return shape
    return _converted(shape, spec.reshape, spec.dims, batched=batched)


def _converted(shape: list[int], source: Sequence[int], target: Sequence[int], *, batched: bool) -> list[int]:
    """Replace `source` by `target` after the batch dimension; each -1 is the size of the next -1 of `source`.

    A shape that does not have the configured number of dimensions is returned unchanged.
    """
    batch = shape[:1] if batched else []
    sizes = shape[len(batch) :]
    if len(sizes) != len(source):
        return shape
    variable = iter([size for size, dim in zip(sizes, source, strict=True) if dim == -1])
    return [*batch, *(next(variable, -1) if dim == -1 else dim for dim in target)]

"""Implicit state: outputs of a sequence's request that are inputs of its next one. The worker keeps them by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InternalError, ServingError
from kernel.serving.validation import fits, shape_text
from shm.arrays import to_bytes
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.worker.reporting.reports import ReportCollector
    from backends.worker.request import OutputValue, Responder, WorkerRequest
    from backends.worker.sequences.sequence_config import StateTensor
    from shm.arrays import Array


class SlotState:
    """The state of one sequence: an input for each state tensor."""

    __slots__ = ("inputs",)

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        #: By the name of the output that replaces it.
        self.inputs = {
            tensor.output_name: Tensor(
                tensor.input_name,
                tensor.datatype,
                list(tensor.initial_shape),
                memoryview(bytearray(tensor.initial_data)) if tensor.same_buffer else tensor.initial_data,
            )
            for tensor in tensors
        }

    def store(self, tensor: StateTensor, output: OutputValue) -> None:
        """Replace a state by an output, which is copied. Raises `InternalError`, and keeps the state as it is."""
        array = output.array
        shape = list(array.shape)
        if output.datatype != tensor.datatype or not fits(shape, tensor.shape):
            raise InternalError(
                f"state output '{tensor.output_name}' has datatype {output.datatype} and shape {shape_text(shape)}, "
                f"but the configuration of the state says {tensor.datatype} and {shape_text(tensor.shape)}"
            )
        data = to_bytes(array)
        kept = self.inputs[tensor.output_name]
        if not tensor.same_buffer:
            self.inputs[tensor.output_name] = Tensor(tensor.input_name, tensor.datatype, shape, bytes(data))
        elif isinstance(kept.data, memoryview) and len(kept.data) == len(data):
            kept.data[:] = data
            kept.shape = shape
        else:
            memory = memoryview(bytearray(data))
            self.inputs[tensor.output_name] = Tensor(tensor.input_name, tensor.datatype, shape, memory)


class ImplicitState:
    """The states of the sequences that an instance has."""

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        self.tensors = tensors
        self._slots: dict[int, SlotState] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def of_request(self, slot: int, *, start: bool) -> SlotState:
        """Return the state for a request; with `start`, a new one."""
        state = None if start else self._slots.get(slot)
        if state is None:
            state = self._slots[slot] = SlotState(self.tensors)
        return state

    def of_padding(self, slot: int) -> SlotState:
        """Return a state for a row without a request. It is a copy: what is done with it has no effect."""
        kept = self._slots.get(slot)
        state = SlotState(self.tensors)
        if kept is not None:
            for name, tensor in kept.inputs.items():
                state.inputs[name] = Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.raw()))
        return state

    def end(self, slot: int) -> None:
        """The sequence in `slot` is over: free its state."""
        self._slots.pop(slot, None)


class StateResponder:
    """Takes the state outputs from the responses of a request, and passes the others on. A `Responder`."""

    __slots__ = ("_inner", "_names", "_state", "_tensors")

    def __init__(self, inner: Responder, request: WorkerRequest, tensors: Sequence[StateTensor], state: SlotState):
        """A request that names its outputs asks for the state outputs, too, from now on."""
        self._inner = inner
        self._state = state
        self._tensors = {tensor.output_name: tensor for tensor in tensors}
        wanted = {output.name for output in request.ref.outputs}
        #: The state outputs that the client gets.
        self._names = {tensor.output_name for tensor in tensors if tensor.visible and (
            not wanted or tensor.output_name in wanted
        )}  # fmt: skip
        if wanted:
            missing = [RequestedOutput(name) for name in self._tensors if name not in wanted]
            request.ref.outputs = [*request.ref.outputs, *missing]

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        if name in self._tensors and name not in self._names:
            return None
        return self._inner.reserve(request, name, datatype, shape)

    def respond(
        self,
        request: WorkerRequest,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool],
        final: bool,
    ) -> None:
        passed_on: list[OutputValue] = []
        try:
            for output in outputs:
                tensor = self._tensors.get(output.name)
                if tensor is not None:
                    self._state.store(tensor, output)
                    if output.name not in self._names:
                        continue
                passed_on.append(output)
        except ServingError as error:
            self._inner.fail(request, error, final)
            return
        self._inner.respond(request, passed_on, parameters, final)

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None:
        self._inner.fail(request, error, final)

    def finish(self, request: WorkerRequest) -> None:
        self._inner.finish(request)

    def reschedule(self, request: WorkerRequest) -> None:
        self._inner.reschedule(request)

    def is_cancelled(self, request: WorkerRequest) -> bool:
        return self._inner.is_cancelled(request)

    def is_ahead(self, request: WorkerRequest) -> bool:
        return self._inner.is_ahead(request)

    def when_taken(self, request: WorkerRequest, callback: Callable[[], object]) -> None:
        self._inner.when_taken(request, callback)

    @property
    def reports(self) -> ReportCollector:
        return self._inner.reports

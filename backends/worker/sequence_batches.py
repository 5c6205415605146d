"""Makes the rows of a batch of sequences: adds control tensors and implicit state to requests, and adds padding.

With the strategy `direct`, a row without a request has zeros as inputs and READY false, and its response is dropped
(Triton's null requests). With `oldest` there are no such rows.

Implicit state: outputs of a sequence's request that are inputs of its next one. The worker keeps them by slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.transport import wire
from backends.worker.reports import ReportCollector
from backends.worker.request import WorkerRequest
from backends.worker.sequence_config import (
    correlation_id_control,
    flag_controls,
    sequence_batching_of,
    state_tensors,
    zeros,
)
from kernel.errors import InternalError, ServingError
from kernel.serving.validation import fits, shape_text
from shm.arrays import to_bytes
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.base import ModelArguments
    from backends.worker.request import OutputValue, Responder
    from backends.worker.sequence_config import CorrelationIdControl, FlagControl, StateTensor
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


#: A row that is no request of a sequence: a warm-up request.
_WARM_UP = wire.SequenceEntry(-1)


class SequenceBatches:
    """The sequences of one instance."""

    def __init__(self, arguments: ModelArguments) -> None:
        """Reads files with initial states. Raises `ServingError`."""
        config = arguments.config
        self.state = ImplicitState(state_tensors(config, arguments.model_dir))
        self._controls = _Controls(
            flag_controls(config), correlation_id_control(config), batched=arguments.max_batch_size > 0
        )
        batching = sequence_batching_of(config) or {}
        self._pads = "oldest" not in batching

    @staticmethod
    def of_model(arguments: ModelArguments) -> SequenceBatches | None:
        """Return the sequences of a model, or None if it has no sequence batching. Raises `ServingError`."""
        return None if sequence_batching_of(arguments.config) is None else SequenceBatches(arguments)

    @staticmethod
    def without_padding(entries: Sequence[wire.RequestMessage]) -> list[wire.RequestMessage]:
        """Return the messages of a batch that are requests."""
        return [entry for entry in entries if entry.sequence is None or not entry.sequence.empty]

    def rows(self, entries: Sequence[wire.RequestMessage], requests: Sequence[WorkerRequest]) -> list[WorkerRequest]:
        """Return the rows of a batch, complete with controls and state.

        `requests` are the requests of `entries` that can be executed. A row whose request cannot is padding, too.
        """
        if not requests:
            return []
        given = {request.ref.number: request for request in requests}
        template = list(requests[0].inputs)
        for request in requests:
            self._complete(request)
        if not self._pads or len(given) == len(entries):
            return list(requests)
        return [given.get(entry.number) or self._padding(entry, template) for entry in entries]

    def end(self, message: wire.EndSequence) -> None:
        """The sequence in a slot is over."""
        self.state.end(message.slot)

    def _complete(self, request: WorkerRequest) -> None:
        ref = request.ref
        entry = ref.sequence or _WARM_UP
        inputs = request.inputs
        start, end = bool(ref.flags & wire.SEQUENCE_START), bool(ref.flags & wire.SEQUENCE_END)
        if entry is _WARM_UP:
            # As in Triton, a sample may have control tensors and states among its inputs.
            names = {tensor.name for tensor in inputs}
            state = SlotState(self.state.tensors)
            controls = self._controls.tensors(True, False, True, 0)
            inputs += [tensor for tensor in (*controls, *state.inputs.values()) if tensor.name not in names]
        else:
            inputs += self._controls.tensors(start, end, True, ref.correlation_id)
            if not self.state.tensors:
                return
            state = self.state.of_request(entry.slot, start=start)
            inputs += state.inputs.values()
        request.responder = StateResponder(request.responder, request, self.state.tensors, state)

    def _padding(self, entry: wire.RequestMessage, template: Sequence[Tensor]) -> WorkerRequest:
        """Return a row without a request: zeros in the shapes of another row's inputs, and READY false."""
        inputs = [
            Tensor(tensor.name, tensor.datatype, list(tensor.shape), zeros(tensor.datatype, tensor.shape))
            for tensor in template
        ]
        inputs += self._controls.tensors(False, False, False, 0)
        slot = -1 if entry.sequence is None else entry.sequence.slot
        if self.state.tensors:
            inputs += self.state.of_padding(slot).inputs.values()
        return WorkerRequest(wire.RequestMessage(entry.number, []), inputs, _NO_RESPONDER)


class _Controls:
    """Makes the control tensors of rows."""

    def __init__(
        self, flags: Sequence[FlagControl], correlation_id: CorrelationIdControl | None, *, batched: bool
    ) -> None:
        self._flags = flags
        self._correlation_id = correlation_id
        self._shape = [1, 1] if batched else [1]
        #: The tensors for START, END and READY, by their values.
        self._made: dict[tuple[bool, bool, bool], list[Tensor]] = {}

    def tensors(self, start: bool, end: bool, ready: bool, correlation_id: int | str) -> list[Tensor]:
        """Return the control tensors of a row. A row that is not ready has the correlation id 0 or an empty string."""
        flags = self._made.get((start, end, ready))
        if flags is None:
            flags = self._made[start, end, ready] = self._make(start, end, ready)
        control = self._correlation_id
        if control is None:
            return flags
        data = control.value(correlation_id if ready or control.datatype != "BYTES" else "")
        return [*flags, Tensor(control.name, control.datatype, self._shape, data)]

    def _make(self, start: bool, end: bool, ready: bool) -> list[Tensor]:
        values = {
            "CONTROL_SEQUENCE_START": start,
            "CONTROL_SEQUENCE_END": end,
            "CONTROL_SEQUENCE_READY": ready,
        }
        return [Tensor(flag.name, flag.datatype, self._shape, flag.values[values[flag.kind]]) for flag in self._flags]


class _NoResponder:
    """Drops the responses of padding."""

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        return None

    def respond(
        self,
        request: WorkerRequest,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool],
        final: bool,
    ) -> None:
        request.finished = request.finished or final

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None:
        request.finished = request.finished or final

    def finish(self, request: WorkerRequest) -> None:
        request.finished = True

    def reschedule(self, request: WorkerRequest) -> None:
        request.finished = True

    def is_cancelled(self, request: WorkerRequest) -> bool:
        return False

    def is_ahead(self, request: WorkerRequest) -> bool:
        return False

    def when_taken(self, request: WorkerRequest, callback: Callable[[], object]) -> None:
        callback()

    @property
    def reports(self) -> ReportCollector:
        return _NO_REPORTS


#: Nothing that is reported of padding is sent.
_NO_REPORTS = ReportCollector(lambda _: None, lambda level, text: None)

_NO_RESPONDER = _NoResponder()

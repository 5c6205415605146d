"""Calls of other models, whose responses come from functions of the test. Implements `ModelCalls`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from backends.worker.calls.interface import CallResponse, ModelCall
from kernel.embedding.arrays import input_tensor, output_array
from kernel.errors import InternalError, RequestCancelled, ServingError
from shm.arrays import to_bytes
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from backends.worker.calls.interface import CallRequest, Result
    from backends.worker.request import OutputValue
    from shm.arrays import Array


class CallInputs(dict[str, "Array"]):
    """A call of the model under test, for the function of the test that responds to it: input name → array."""

    def __init__(self, request: CallRequest) -> None:
        super().__init__((each.name, output_array(_inline(each))) for each in request.inputs)
        self.model_name = request.model_name
        #: Empty for the newest version.
        self.model_version = request.model_version
        #: Empty for all outputs.
        self.requested_output_names = tuple(request.outputs)
        self.request_id = request.id
        self.correlation_id = request.correlation_id
        self.flags = request.flags
        self.priority = request.priority
        self.timeout_us = request.timeout_us
        self.parameters = dict(request.parameters)
        #: Whether the model accepts several responses: `exec(decoupled=True)`.
        self.decoupled = request.streaming


def _inline(value: OutputValue | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return Tensor(value.name, value.datatype, list(value.array.shape), to_bytes(value.array))


#: Responds to the calls of one model: returns output name → array or list; or, as a decoupled model, an iterable of
#: those, such as a generator. A `ServingError` that it raises is the error that the caller gets.
ModelFunction = Callable[[CallInputs], object]


class FunctionCalls:
    """The calls of one model under test. A function runs in the thread of the model that makes the call."""

    def __init__(self, functions: Mapping[str, ModelFunction]) -> None:
        """`functions`: name of a model → what responds to its calls."""
        self._functions = dict(functions)
        self._numbers = itertools.count(1)
        #: Calls that may have more responses: number → those that the function still makes.
        self._open: dict[int, Iterator[object]] = {}
        #: What the model did with other models: (action, name), where the action is load, unload or ready.
        self.controlled: list[tuple[str, str]] = []

    def start(self, request: CallRequest) -> ModelCall:
        """See `ModelCalls`. Raises `LookupError` if the test has no function for the model."""
        function = self._functions.get(request.model_name)
        if function is None:
            known = ", ".join(sorted(self._functions)) or "none"
            raise LookupError(
                f"the model calls model '{request.model_name}', for which the test has no function; it has: {known}. "
                f"Give one: load_model(..., calls={{'{request.model_name}': function}})"
            )
        call = ModelCall(next(self._numbers), streaming=request.streaming)
        try:
            result = function(CallInputs(request))
            if isinstance(result, Mapping):
                self._end(call, CallResponse(_tensors(result), final=True))
            elif request.streaming:
                self._open[call.number] = iter(_responses(result))
            else:
                self._end(call, _only(list(_responses(result)), request.model_name))
        except ServingError as error:
            self._end(call, CallResponse(error=error, final=True))
        return call

    def _end(self, call: ModelCall, response: CallResponse) -> None:
        call.responses.append(response)
        call.ended = True
        self._open.pop(call.number, None)

    def wait(self, call: ModelCall) -> CallResponse:
        """See `ModelCalls`. The function makes the response now."""
        response = self.take(call)
        if response is None:
            raise InternalError("the call has ended: there is no further response")
        return response

    def take(self, call: ModelCall) -> CallResponse | None:
        if not call.responses and call.number in self._open:
            self._make_next(call)
        return call.responses.popleft() if call.responses else None

    def _make_next(self, call: ModelCall) -> None:
        try:
            result = next(self._open[call.number])
            call.responses.append(CallResponse(_tensors(result)))
        except StopIteration:
            self._end(call, CallResponse(final=True, empty=True))
        except ServingError as error:
            self._end(call, CallResponse(error=error, final=True))

    def notify(self, call: ModelCall, on_response: Callable[[], None]) -> None:
        """See `ModelCalls`. A response is always there."""
        on_response()

    def cancel(self, call: ModelCall) -> None:
        if not call.ended:
            self._end(call, CallResponse(error=RequestCancelled(), final=True))

    def discard(self, call: ModelCall) -> None:
        call.responses.clear()
        self._open.pop(call.number, None)

    def wait_for(self, future: Future[Result]) -> Result:
        return future.result()

    def control(
        self,
        action: str,
        model_name: str,
        *,
        version: str = "",
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        unload_dependents: bool = False,
    ) -> bool:
        """See `ModelCalls`. A model is ready if the test has a function for it."""
        self.controlled.append((action, model_name))
        return model_name in self._functions


def _responses(result: object) -> Iterable[object]:
    """Return the responses of a function that returned no mapping. Raises `TypeError`."""
    if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
        raise TypeError(
            "the function of a called model must return a dict of outputs, or an iterable of such, not "
            f"{type(result).__name__}"
        )
    return result


def _only(results: list[object], model_name: str) -> CallResponse:
    if len(results) != 1:
        raise InternalError(f"model '{model_name}' sent {len(results)} responses to a call that accepts one")
    return CallResponse(_tensors(results[0]), final=True)


def _tensors(outputs: object) -> list[Tensor]:
    """Return the outputs of a response. Raises `TypeError`."""
    if not isinstance(outputs, Mapping):
        raise TypeError(f"a response of a called model is a dict of outputs, not {type(outputs).__name__}")
    return [_tensor(str(name), value) for name, value in outputs.items()]


def _tensor(name: str, value: Any) -> Tensor:
    tensor = input_tensor(name, value, None)
    return Tensor(name, tensor.datatype, tensor.shape, memoryview(bytearray(tensor.data or b"")))

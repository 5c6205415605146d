"""A double of what the worker offers to models that call others: calls are recorded, and the test responds to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from backends.worker.model_calls import CallRequest, CallResponse, ModelCall
from shm.arrays import to_array
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from backends.worker.request import OutputValue
    from kernel.errors import ServingError
    from shm.arrays import Array

_Result = TypeVar("_Result")


class RecordedCalls:
    """Implements `backends.worker.model_calls.ModelCalls`. `respond` makes the responses to each call."""

    def __init__(self) -> None:
        self.started: list[CallRequest] = []
        self.cancelled: list[int] = []
        self.discarded: list[int] = []
        self.controlled: list[dict[str, object]] = []
        #: Raised by `control`, or by `start`.
        self.control_error: ServingError | None = None
        self.start_error: ServingError | None = None
        self.ready = False
        #: Returns the responses to a call: by default its inputs, as outputs.
        self.respond: Callable[[CallRequest], list[CallResponse]] = _inputs_back
        self.open: list[ModelCall] = []
        #: Called when a call was cancelled, or discarded.
        self.on_cancel: Callable[[], None] = lambda: None
        self.on_discard: Callable[[], None] = lambda: None

    def start(self, request: CallRequest) -> ModelCall:
        if self.start_error is not None:
            raise self.start_error
        self.started.append(request)
        call = ModelCall(len(self.started), streaming=request.streaming)
        self.open.append(call)
        for response in self.respond(request):
            self.deliver(call, response)
        return call

    def deliver(self, call: ModelCall, response: CallResponse) -> None:
        """Give `call` another response."""
        call.ended = response.final
        call.responses.append(response)
        if call.on_response is not None:
            call.on_response()

    def wait(self, call: ModelCall) -> CallResponse:
        return call.responses.popleft()

    def take(self, call: ModelCall) -> CallResponse | None:
        return call.responses.popleft() if call.responses else None

    def notify(self, call: ModelCall, on_response: Callable[[], None]) -> None:
        call.on_response = on_response
        on_response()

    def cancel(self, call: ModelCall) -> None:
        self.cancelled.append(call.number)
        self.on_cancel()

    def discard(self, call: ModelCall) -> None:
        self.discarded.append(call.number)
        self.on_discard()

    def wait_for(self, future: Future[_Result]) -> _Result:
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
        if self.control_error is not None:
            raise self.control_error
        self.controlled.append(
            {
                "action": action,
                "model_name": model_name,
                "version": version,
                "config": config,
                "files": files,
                "unload_dependents": unload_dependents,
            }
        )
        return self.ready


def _inputs_back(request: CallRequest) -> list[CallResponse]:
    outputs = []
    for value in request.inputs:
        array = array_of(value)
        data = memoryview(bytearray(np.array(array).tobytes()))
        outputs.append(Tensor(value.name, value.datatype, list(array.shape), data))
    return [CallResponse(outputs, {"answer": 42}, final=True)]


def array_of(value: OutputValue | Tensor) -> Array:
    """Return an input of a call as an array, also one that the model has passed on as it came."""
    if isinstance(value, Tensor):
        assert value.data is not None
        return to_array(value.datatype, value.shape, value.data)
    return np.asarray(value.array)

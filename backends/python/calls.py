"""Calls of other models from a Python model: `InferenceRequest.exec` and `async_exec`. Texts and rules are Triton's.

Functions of `pb_utils` with which a model loads and unloads models, and asks whether a model is ready.

A model may call them in `initialize` and later, from any thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING

from backends.python.conversions import as_text
from backends.python.failures import TritonModelException, incompatible_arguments, is_truth
from backends.python.instance import current_instance
from backends.python.responses import InferenceResponse, TritonError, TritonErrorCode
from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from backends.python.instance import PythonInstance
    from backends.python.requests import PreferredMemory
    from backends.worker.model_calls import CallRequest, CallResponse, ModelCall
    from backends.worker.request import WorkerRequest

#: The most bytes of responses that an iterator keeps to repeat them.
MAX_KEPT_BYTE_SIZE = 64 << 20


class ExecutedRequests:
    """The requests that a coroutine of the model executes."""

    __slots__ = ("blocking", "numbers")

    def __init__(self, requests: Sequence[WorkerRequest], *, blocking: bool) -> None:
        """`blocking`: the requests have no response before the coroutine ends."""
        self.numbers = [request.ref.number for request in requests]
        self.blocking = blocking


#: Set in the coroutines of an `async def execute`.
executed: contextvars.ContextVar[ExecutedRequests | None] = contextvars.ContextVar("executed", default=None)


def calling_instance() -> PythonInstance:
    """Return the instance of this process. Raises `TritonModelException` before and after the time in which models may
    call others."""
    instance = current_instance()
    if not instance.may_call:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    return instance


def execute(request: CallRequest, preferred: PreferredMemory | None = None) -> InferenceResponse | ResponseIterator:
    """Send `request` and wait for its response, or for the first one if it is streaming.

    `preferred` is where the model wants the results; None for where the other model makes them.
    """
    instance = calling_instance()
    _add_context(request)
    calls = instance.host.calls
    try:
        call = calls.start(request)
    except ServingError as error:
        return _failed(error, request)
    if request.streaming:
        return ResponseIterator(instance, call, None, preferred)
    response = last = calls.wait(call)
    while not last.final:  # the end of the responses comes alone
        last = calls.wait(call)
    return _response(response, instance, preferred)


async def execute_async(
    request: CallRequest, preferred: PreferredMemory | None = None
) -> InferenceResponse | ResponseIterator:
    """As `execute`, while other tasks of the event loop run. A cancelled task cancels the call.

    A stream is returned when its first response has come (Triton): a `for` over a stream of one response, which is the
    usual way, then does not hold up the event loop. Its responses are received before the model asks for them: the
    model may wait for the first response of another call, which the same instance executes afterwards.
    """
    instance = calling_instance()
    _add_context(request)
    calls = instance.host.calls
    try:
        call = calls.start(request)
    except ServingError as error:
        return _failed(error, request)
    call.reads_ahead = request.streaming
    loop, come, streaming = asyncio.get_running_loop(), asyncio.Event(), request.streaming

    def on_response() -> None:  # the call refers to it: with the request it would keep the inputs
        if call.ended or (streaming and call.responses):
            _wake(loop, come)

    calls.notify(call, on_response)
    try:
        await come.wait()
    except asyncio.CancelledError:
        calls.cancel(call)
        calls.discard(call)
        raise
    if streaming:
        return ResponseIterator(instance, call, None, preferred)
    response = calls.take(call)
    assert response is not None
    return _response(response, instance, preferred)


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:  # the loop has ended: nobody waits
        return


def _add_context(request: CallRequest) -> None:
    context = executed.get()
    if context is not None and request.parents is None:
        request.parents = context.numbers
        request.blocking = context.blocking


def _failed(error: ServingError, request: CallRequest) -> InferenceResponse | ResponseIterator:
    failed = InferenceResponse(error=_triton_error(error))
    return ResponseIterator(None, None, failed) if request.streaming else failed


def _triton_error(error: ServingError) -> TritonError:
    return TritonError(error.message, TritonErrorCode[error.code.name])


def _response(response: CallResponse, instance: PythonInstance, preferred: PreferredMemory | None) -> InferenceResponse:
    """Return the response for the model. Its tensors use the memory of the other model's outputs."""
    if response.error is not None:
        return InferenceResponse(error=_triton_error(response.error))
    if response.empty:
        return InferenceResponse(error=_triton_error(InternalError("Unexpected empty response.")))
    try:
        tensors = instance.results(response.outputs, instance.writable_inputs, preferred)
    except ServingError as error:  # no memory is left where the model prefers them
        return InferenceResponse(error=_triton_error(error))
    return InferenceResponse.received(tensors, response.parameters)


class ResponseIterator:
    """The responses of a call with `decoupled=True`, for `for` and `async for`.

    The last item may be a response without tensors. A second iteration repeats the responses, as in Triton, unless they
    have more than 64 MiB together. If the iterator is dropped, the call is cancelled. In Triton it continues.
    """

    def __init__(
        self,
        instance: PythonInstance | None,
        call: ModelCall | None,
        failed: InferenceResponse | None,
        preferred: PreferredMemory | None = None,
    ) -> None:
        """With `failed` that is the only response; `preferred` is as in `execute`."""
        self._preferred = preferred
        self._instance = instance
        self._call = call
        self._finished = call is None
        self._discard = None if instance is None else instance.call_discarder()
        self._kept: list[InferenceResponse] = [] if failed is None else [failed]
        self._kept_byte_size = 0
        #: Whether all responses are kept.
        self._complete = True
        self._position = 0
        #: One thread waits for a response at a time.
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if not self._finished and self._discard is not None and self._call is not None:
            # Not here: the garbage collector can call this at any point, also while a lock is held.
            self._discard(self._call)

    def __iter__(self) -> ResponseIterator:
        if self._finished and self._position >= len(self._kept):
            self._restart()
        return self

    def __next__(self) -> InferenceResponse:
        with self._lock:
            if self._finished:
                return self._repeated()
            assert self._instance is not None
            assert self._call is not None
            return self._received(self._instance.host.calls.wait(self._call))

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[InferenceResponse]:
        call, instance = self._call, self._instance
        if call is not None and instance is not None and not self._finished:
            loop, come = asyncio.get_running_loop(), asyncio.Event()
            instance.host.calls.notify(call, lambda: _wake(loop, come))
            while not self._finished:
                received = instance.host.calls.take(call)
                if received is not None:
                    yield self._received(received)
                else:
                    await come.wait()
                    come.clear()
            return
        iter(self)
        for response in self:
            yield response

    def cancel(self) -> None:
        """Cancel the call. Its last response, with the code CANCELLED, comes soon."""
        if not self._finished and self._instance is not None and self._call is not None:
            self._instance.host.calls.cancel(self._call)

    def _received(self, received: CallResponse) -> InferenceResponse:
        assert self._instance is not None
        response = InferenceResponse([]) if received.empty else _response(received, self._instance, self._preferred)
        self._finished = received.final
        self._kept_byte_size += sum(tensor.byte_size for tensor in received.outputs)
        if self._complete and self._kept_byte_size <= MAX_KEPT_BYTE_SIZE:
            self._kept.append(response)
        else:
            self._complete = False
            self._kept.clear()
        self._position = len(self._kept)
        return response

    def _repeated(self) -> InferenceResponse:
        if self._position < len(self._kept):
            self._position += 1
            return self._kept[self._position - 1]
        raise StopIteration("Iteration is done for the responses.")

    def _restart(self) -> None:
        if not self._complete:
            raise TritonModelException(
                f"the responses have more than {MAX_KEPT_BYTE_SIZE} bytes together, and can be iterated only once"
            )
        self._position = 0


_LOAD = "load_model(model_name: str, config: str = '', files: object = None) -> None"

_UNLOAD = "unload_model(model_name: str, unload_dependents: bool = False) -> None"

#: Triton's words.
_FAILURES = {
    "load": "Failed to load model",
    "unload": "Failed to unload model",
    "ready": "Failed to check model readiness",
}

_READY = "is_model_ready(model_name: str, model_version: str = '') -> bool"


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model, and return when it is ready.

    `config` is a configuration in JSON that replaces the one in the repository. `files` (`file:<path>` → bytes) replace
    the model's folder. The server must have explicit model control. Raises `TritonModelException` if the load fails.
    """
    name, text = as_text(model_name), as_text(config)
    if name is None or text is None:
        raise incompatible_arguments("load_model", _LOAD, model_name, config, files)
    if files is not None:
        if not isinstance(files, dict):
            raise TritonModelException("failed to parse `files` when loading model: not a dictionary")
        for path, data in files.items():
            if not isinstance(path, str) or not isinstance(data, bytes):
                raise incompatible_arguments("load_model", _LOAD, model_name, config, files)
    _control("load", name, config=text or None, files=files)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; its requests in flight finish. With `unload_dependents` also the models that an ensemble loaded.

    Raises `TritonModelException` if the server does not allow it.
    """
    name = as_text(model_name)
    if name is None or not is_truth(unload_dependents):
        raise incompatible_arguments("unload_model", _UNLOAD, model_name, unload_dependents)
    _control("unload", name, unload_dependents=bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a model can execute requests; without a version, whether any version can."""
    name, version = as_text(model_name), as_text(model_version)
    if name is None or version is None:
        raise incompatible_arguments("is_model_ready", _READY, model_name, model_version)
    return _control("ready", name, version=version)


def _control(
    action: str,
    model_name: str,
    *,
    version: str = "",
    config: str | None = None,
    files: Mapping[str, bytes] | None = None,
    unload_dependents: bool = False,
) -> bool:
    instance = current_instance()
    try:
        return instance.host.calls.control(
            action, model_name, version=version, config=config, files=files, unload_dependents=unload_dependents
        )
    except ServingError as error:
        raise TritonModelException(
            f"{_FAILURES[action]}: Failed to process the request for model '{instance.name}', message: {error.message}"
        ) from None

"""Calls of other models, from any thread of this worker's model.

A call is sent by the thread that makes it. Its responses are taken by the thread that reads the connection: the one
that waits for the response, or the main thread, or, for calls that an event loop awaits, a thread that only reads.

A thread that reads the connection while an event loop awaits calls, since the loop cannot wait for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from backends.transport import wire
from backends.transport.framing import FrameTooLarge
from backends.worker.inputs import check_strings, is_aligned
from backends.worker.message_reader import KernelGone
from backends.worker.model_calls import READ_AHEAD_BYTE_SIZE, CallResponse, ModelCall, Result
from kernel.errors import ErrorCode, InternalError, ServingError, worker_error
from shm.tensor import RequestedOutput, Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from backends.worker.held_inputs import HeldInputs
    from backends.worker.members import TakesTurns, Turn
    from backends.worker.memory import AttachedRegions, WorkerRegion
    from backends.worker.message_reader import KernelMessageReader
    from backends.worker.model_calls import CallRequest
    from backends.worker.outputs import OutputWriter
    from backends.worker.responder import BatchResponder

#: The model says that it took responses in portions, so that a stream does not need a message for each.
_CREDIT_PORTION = wire.CREDIT_WINDOW // 4

#: The bytes of one `ModelFile`.
_FILE_PART = 1 << 20


class WorkerCalls:
    """The calls of one worker. See `ModelCalls`."""

    def __init__(
        self,
        send: Callable[[wire.ToKernel], None],
        reader: Callable[[], KernelMessageReader],
        responder: BatchResponder,
        outputs: OutputWriter,
        regions: AttachedRegions,
        held: HeldInputs,
    ) -> None:
        self._send = send
        self._reader = reader
        self._responder = responder
        self._outputs = outputs
        self._regions = regions
        self._held = held
        #: Calls that have no final response yet, and actions with models that have no result.
        self._open: dict[int, ModelCall] = {}
        self._controls: dict[int, wire.ModelControlled | None] = {}
        self._last_number = 0
        #: Numbers must be sent in order.
        self._lock = threading.Lock()
        self._pump = CallPump(reader, self._lost)
        self._main_thread = threading.get_ident()
        #: Set when a call begins or ends; only in a process of several models.
        self._wake = threading.Event()
        #: In a process of several models: whose turn it is, and the model of this worker.
        self.turn: tuple[Turn, TakesTurns] | None = None
        #: The name of this worker's model, set when it is loaded.
        self.model_name = ""
        #: Makes results of what is in regions on devices; None for an instance without one, or without shared memory.
        self.result_on_device: Callable[[Tensor, Span, WorkerRegion, int], Tensor | None] | None = None
        #: Models that take no inputs on a device.
        self._on_host: set[str] = set()

    # ---- for models --------------------------------------------------------------------------

    def start(self, request: CallRequest) -> ModelCall:
        self._held.report_freed()
        in_execute = self._responder.executed_by_this_thread
        parents, blocking = request.parents, request.blocking
        if parents is None:
            parents = self._responder.possible_parents()
        if blocking is None:
            blocking = in_execute
        if self.result_on_device is None:
            request.on_device = False
        call = ModelCall(0, streaming=request.streaming)
        self._submit(call, request, parents, blocking, executing=in_execute)
        if self.turn is not None:
            self._wake.set()
        return call

    def _submit(
        self, call: ModelCall, request: CallRequest, parents: Sequence[int], blocking: bool, *, executing: bool
    ) -> None:
        """Send a call under a new number. Raises `ServingError`."""
        # Instances of one model share the memory of their inputs: one may change what another one reads.
        shares = request.model_name == self.model_name
        on_device = self.result_on_device is not None and request.model_name not in self._on_host
        inputs = self._outputs.write_inputs(
            request.inputs, in_place=not shares, executing=executing, on_device=on_device
        )
        if on_device and any(map(_is_on_device, inputs)):
            request.parents, request.blocking, call.request = parents, blocking, request
        ref = wire.RequestMessage(
            0,
            inputs,
            [RequestedOutput(name) for name in request.outputs],
            request.id,
            request.flags,
            request.correlation_id,
            request.priority,
            request.timeout_us,
            dict(request.parameters),
        )
        with self._lock:
            number = call.number = self._last_number = self._last_number + 1
            self._open[number] = call
            try:
                self._send(
                    wire.Submit(
                        number,
                        request.model_name,
                        request.model_version,
                        ref,
                        list(parents),
                        blocking,
                        request.streaming,
                        request.trace_parent,
                        request.on_device,
                    )
                )
            except FrameTooLarge as error:
                del self._open[number]
                self._outputs.free(inputs)
                raise InternalError(f"the request is too long for the server: {error}") from error

    def wait(self, call: ModelCall) -> CallResponse:
        responses = call.responses
        if not responses:
            self._wait_until(responses.__len__)
        response = self.take(call)
        assert response is not None
        return response

    def take(self, call: ModelCall) -> CallResponse | None:
        if not call.responses:
            return None
        response = call.responses.popleft()
        if call.streaming and not call.ended:
            with self._lock:
                if call.ahead_count:
                    call.ahead_count -= 1
                else:
                    self._consumed(call)
        return response

    def _consumed(self, call: ModelCall) -> None:
        """A response of a stream was taken; the lock is held."""
        call.consumed += 1
        if call.consumed >= _CREDIT_PORTION:
            count, call.consumed = call.consumed, 0
            self._send(wire.CallConsumed(call.number, count))

    def _read_ahead(self, call: ModelCall, response: CallResponse) -> None:
        """Let more responses come, although the model has not taken this one."""
        with self._lock:
            call.ahead_count += 1
            call.ahead_byte_size += sum(tensor.byte_size for tensor in response.outputs)
            call.reads_ahead = call.ahead_byte_size < READ_AHEAD_BYTE_SIZE
            self._consumed(call)

    def notify(self, call: ModelCall, on_response: Callable[[], None]) -> None:
        call.on_response = on_response
        if not call.ended:
            self._pump.read_for(call)
        on_response()  # what has come before

    def cancel(self, call: ModelCall) -> None:
        call.cancelled = True
        if not call.ended:
            self._send(wire.CancelCall(call.number))

    def discard(self, call: ModelCall) -> None:
        call.discarded = True
        if not call.cancelled:
            self.cancel(call)
        while self.take(call) is not None:
            pass

    def wait_for(self, future: Future[Result]) -> Result:
        if self.turn is None:
            return future.result()
        future.add_done_callback(lambda _: self._wake.set())
        while not future.done():
            self._await_wake()
            if self._open and not future.done():
                turn, model = self.turn
                with turn.given_on(model):
                    while self._open and not future.done():
                        self._await_wake()
        return future.result()

    def _await_wake(self) -> None:
        self._wake.wait()
        self._wake.clear()

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
        with self._lock:
            number = self._last_number = self._last_number + 1
        self._controls[number] = None
        for path, data in (files or {}).items():
            view = memoryview(data)
            for start in range(0, max(1, len(view)), _FILE_PART):
                self._send(wire.ModelFile(number, path, bytes(view[start : start + _FILE_PART])))
        self._send(wire.ControlModel(number, action, model_name, version, config, unload_dependents))
        self._wait_until(lambda: self._controls[number] is not None)
        result = self._controls.pop(number)
        assert result is not None
        if result.error_code:
            raise worker_error(ErrorCode(result.error_code), result.error_text)
        return result.ready

    def _wait_until(self, done: Callable[[], object]) -> None:
        turn = self.turn
        if turn is None or threading.get_ident() != self._main_thread:
            self._reader().wait_until(done)
        else:  # the model that is called may be one of this process
            with turn[0].given_on(turn[1]):
                self._reader().wait_until(done)

    # ---- messages, from the thread that reads ------------------------------------------------

    def responded(self, message: wire.CallResponded) -> None:
        """Take a response of a call."""
        self._held.report_freed()
        call = self._open[message.call]
        call.request = None
        self._take_response(call, self._response(message))

    def on_host(self, message: wire.CallOnHost) -> None:
        """Send a call again, with inputs on the host: its model takes none on a device."""
        call = self._open.pop(message.call)
        request, call.request = call.request, None
        assert request is not None, f"call {message.call} had no inputs on a device"
        self._on_host.add(request.model_name)
        try:
            self._submit(call, request, request.parents or (), bool(request.blocking), executing=False)
        except ServingError as error:
            self._open[call.number] = call
            self._take_response(call, CallResponse(error=error, final=True))
            return
        if call.cancelled:  # perhaps under the other number
            self._send(wire.CancelCall(call.number))

    def on_device_again(self, _: wire.OnDeviceAgain) -> None:
        """A model takes inputs on a device that took none. Others of which that is not so say it once more."""
        self._on_host.clear()

    def _take_response(self, call: ModelCall, response: CallResponse) -> None:
        # In this order: who sees that the call has ended finds the last response, and `read_for` sees the end.
        if call.reads_ahead and not response.final:
            self._read_ahead(call, response)
        call.responses.append(response)
        call.ended = response.final
        if response.final:
            del self._open[call.number]
            self._pump.ended(call)
        if call.discarded:
            self.take(call)
        if call.on_response is not None:
            call.on_response()
        if self.turn is not None:
            self._wake.set()

    def controlled(self, message: wire.ModelControlled) -> None:
        """Take the result of an action with a model."""
        self._controls[message.call] = message

    def _response(self, message: wire.CallResponded) -> CallResponse:
        response = message.response
        if response is None:
            return CallResponse(final=message.final, empty=True)
        if response.error_code:
            error = worker_error(ErrorCode(response.error_code), response.error_text)
            return CallResponse(error=error, final=message.final)
        outputs: list[Tensor] = []
        lease = message.lease
        failure: ServingError | None = None
        for tensor in response.outputs:
            try:
                outputs.append(self._resolved(tensor, lease))
            except ServingError as error:  # its bytes were copied, or are dropped with the view of them
                failure = error
            lease += tensor.span is not None and lease > 0
        if failure is not None:
            return CallResponse(error=failure, final=message.final)
        return CallResponse(outputs, response.parameters, final=message.final)

    def _resolved(self, tensor: Tensor, lease: int) -> Tensor:
        """Return a tensor of a response with its bytes in `data`. Raises `ServingError`."""
        data = tensor.data
        if tensor.span is not None:
            if self.result_on_device is not None and lease:
                region = self._regions.get(tensor.span.lease.region_number)
                found = self.result_on_device(tensor, tensor.span, region, lease)
                if found is not None:
                    return found
            data = self._view(tensor, tensor.span, lease)
        resolved = Tensor(tensor.name, tensor.datatype, tensor.shape, data)
        if tensor.datatype == "BYTES":
            check_strings(resolved, "", self.model_name)
        return resolved

    def _view(self, tensor: Tensor, span: Span, lease: int) -> memoryview:
        region = self._regions.get(span.lease.region_number)
        if not lease:  # the bytes were sent
            return region.input_view(span.offset, span.byte_size)
        # As of inputs: see `InputReader`.
        if (tensor.datatype == "BYTES" and not region.steady) or not is_aligned(tensor, span):
            copy = memoryview(bytearray(region.view(span.offset, span.byte_size)))
            self._held.drop_result(lease)
            return copy
        return self._held.hold_result(lease, region, span.offset, span.byte_size)

    def _lost(self) -> None:
        """The kernel is gone: let everything that waits without reading notice it."""
        for call in list(self._open.values()):
            call.responses.append(CallResponse(error=InternalError("the server has ended"), final=True))
            call.ended = True
            if call.on_response is not None:
                call.on_response()


def _is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor is in an arena of this worker on a device."""
    return tensor.span is not None and tensor.span.lease.region_number < wire.OUTPUT_ARENA


class CallPump:
    """The thread. It is started when it is first needed, and waits while no call is awaited."""

    def __init__(self, reader: Callable[[], KernelMessageReader], on_lost: Callable[[], None]) -> None:
        self._reader = reader
        self._on_lost = on_lost
        self._awaited: set[ModelCall] = set()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    def read_for(self, call: ModelCall) -> None:
        """Read until `call` has ended."""
        with self._changed:
            self._awaited.add(call)
            if call.ended:  # meanwhile
                self._awaited.discard(call)
            elif self._thread is None:
                self._thread = threading.Thread(target=self._run, name="calls", daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def ended(self, call: ModelCall) -> None:
        """`call` has got its final response."""
        if self._awaited:
            with self._lock:
                self._awaited.discard(call)

    def _run(self) -> None:
        awaited = self._awaited
        try:
            while True:
                with self._changed:
                    while not awaited:
                        self._changed.wait()
                self._reader().wait_until(lambda: not awaited)
        except (KernelGone, OSError):
            self._on_lost()

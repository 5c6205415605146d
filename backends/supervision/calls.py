"""The calls of other models that one worker makes: takes its messages, and sends it the responses.

`kernel.serving.calls.Calls` executes the calls of all workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backends.transport import wire
from backends.transport.texts import shortened
from kernel.errors import ServingError, Unavailable
from kernel.serving.calls import Execution
from kernel.serving.device_tensors import leaves_device_tensors, outputs_on_devices, takes_device_tensors
from kernel.serving.request import Request
from shm.region import RegionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from backends.supervision.remote_memory import RemoteMemory
    from backends.supervision.session import WorkerSession
    from backends.supervision.worker_memory import WorkerMemory
    from kernel.serving.calls import Calls
    from kernel.serving.instance import Instance
    from kernel.serving.response import Response
    from shm.tensor import Span, Tensor

#: The most outputs that a call may name.
_MOST_NAMES = 1 << 12


class _CallSink(msgspec.Struct, eq=False):
    """Gives the responses of a call to its caller."""

    calls: CallerCalls
    number: int
    parent: Request | None

    @property
    def peer(self) -> str:
        """Calls name no regions of clients."""
        return ""

    def header(self, name: str) -> str:
        """Return a header of the request for which the model calls."""
        return "" if self.parent is None else self.parent.sink.header(name)

    def send(self, response: Response) -> None:
        self.calls.responded(self.number, response)


class _OpenCall(msgspec.Struct, eq=False):
    request: Request
    #: The requests for which the model may have called.
    parents: list[Request]


class CallerCalls:
    """The calls of one worker that have no final response yet, and the results that it keeps."""

    def __init__(
        self,
        instance: Instance,
        calls: Calls,
        memory: WorkerMemory | RemoteMemory,
        session: WorkerSession,
        requests: Callable[[], Mapping[int, Request]],
        kept_limit: int,
        namespace: str = "",
    ) -> None:
        """`requests` returns the requests that the worker executes, by their numbers.

        `kept_limit` is the most bytes of results in shared memory that the model may keep. `namespace` is the
        repository of the model if repositories are namespaces.
        """
        self._instance = instance
        self._calls = calls
        self._memory = memory
        self._send = session.send
        self._flush = session.flush
        self._requests = requests
        self._kept_limit = kept_limit
        self._namespace = namespace
        #: By the number in messages.
        self._open: dict[int, _OpenCall] = {}
        #: The calls of streams that were made for each request.
        self._streams: dict[Request, list[int]] = {}
        self.last_call = 0
        #: The requests that the worker executes and has called models for.
        self._callers: set[Request] = set()
        #: Outputs that the worker may use, by the numbers of their leases.
        self._results: dict[int, Tensor] = {}
        self._kept_byte_size = 0
        self._last_lease = 0
        #: Models of which the worker knows that they take no inputs on a device.
        self.refused: set[str] = set()

    @property
    def open_count(self) -> int:
        """How many calls have no final response."""
        return len(self._open)

    @property
    def result_count(self) -> int:
        """How many results in shared memory the worker may use."""
        return len(self._results)

    # ---- messages from the worker ------------------------------------------------------------

    def submit(self, message: wire.Submit) -> None:
        """Send a call to its model. Raises ValueError for a message that breaks the protocol."""
        if message.call <= self.last_call:
            raise ValueError(f"call {message.call} after call {self.last_call}")
        self.last_call = message.call
        requests = self._requests()
        parents = [requests[number] for number in message.parents if number in requests]
        call = self._request_of(message, parents)
        if self._refuses_devices(message, call):
            call.release_leases()
            self._send(wire.CallOnHost(message.call))
            return
        self._open[message.call] = _OpenCall(call, parents)
        self._callers.update(parents)
        if message.streaming:
            for parent in parents:
                self._streams.setdefault(parent, []).append(message.call)
        try:
            self._calls.submit(
                call, self._execution_of(message), streaming=message.streaming, namespace=self._namespace
            )
        except ServingError as error:
            del self._open[message.call]
            self._send(wire.CallResponded(message.call, True, _failure(error)))

    def _request_of(self, message: wire.Submit, parents: list[Request]) -> Request:
        ref = message.request
        if len(ref.outputs) > _MOST_NAMES or any(o.span or o.client_span or o.classification for o in ref.outputs):
            raise ValueError("a call with outputs that have a place")
        taken: list[Tensor] = []
        try:
            for tensor in ref.inputs:
                if tensor.span is not None:
                    self._memory.take_call_input(tensor, tensor.span, self._requests(), self._results)
                    taken.append(tensor)
                elif tensor.data is None:
                    raise ValueError(f"input '{tensor.name}' of a call has no bytes")
        except ValueError:
            for tensor in taken:
                tensor.release()
            raise
        parent = parents[0] if parents else None
        return Request(
            message.model_name,
            ref.inputs,
            _CallSink(self, message.call, parent),
            message.model_version,
            ref.id,
            ref.outputs,
            ref.parameters,
            ref.correlation_id,
            bool(ref.flags & wire.SEQUENCE_START),
            bool(ref.flags & wire.SEQUENCE_END),
            ref.priority,
            ref.timeout_us,
            streaming=True,
            parent=parent,
            trace_parent=self._requests().get(message.trace_parent),
        )

    def _refuses_devices(self, message: wire.Submit, call: Request) -> bool:
        """Whether a call has inputs on a device that its model does not take there. If not, its results may stay there.

        Raises ValueError for what no worker of ours sends.
        """
        on_device = [each.name for each in call.inputs if each.span is not None and _is_on_device(each.span)]
        if not (on_device or message.on_device or self.refused):
            return False
        if message.on_device and not self._memory.opens_devices:
            raise ValueError("results on a device, which the worker cannot open")
        model = self._calls.find(call.model_name, call.model_version, self._namespace)
        if model is None:  # the call fails
            return False
        find = self._calls.find
        if on_device and not takes_device_tensors(model, on_device, find):
            self.refused.add(call.model_name)
            return True
        if call.model_name in self.refused and takes_device_tensors(model, [each.name for each in call.inputs], find):
            self.refused.clear()  # as the worker does
            self._send(wire.OnDeviceAgain())
        if message.on_device and leaves_device_tensors(model, find):
            call.outputs = outputs_on_devices(model, call.outputs)
        return False

    def _execution_of(self, message: wire.Submit) -> Execution | None:
        """Return the batch from which a call was made; None if the worker has finished it, or executes none."""
        for batch in self._instance.record.batches.values():
            if any(number in batch.request_numbers() for number in message.parents[:1]):
                return Execution(self._instance, batch.number, message.blocking)
        return None

    def cancel(self, number: int) -> None:
        """The model no longer waits for a call. It may have got its final response meanwhile."""
        call = self._open.get(number)
        if call is not None:
            call.request.cancel()

    def consumed(self, number: int, count: int) -> None:
        """The model took responses of a call. It may have got its final response meanwhile."""
        call = self._open.get(number)
        if call is not None:
            call.request.consumed(count)

    def released(self, leases: list[int]) -> None:
        """The model has dropped results. Raises ValueError for those that it did not have."""
        for lease in leases:
            tensor = self._results.pop(lease, None)
            if tensor is None:
                raise ValueError(f"result {lease} was released, which the worker did not have")
            self._kept_byte_size -= tensor.byte_size
            tensor.release()

    # ---- events ------------------------------------------------------------------------------

    def requeued(self, request: Request) -> None:
        """A request that was dispatched to the worker is queued again."""
        self._calls.requeued(request)

    def parent_cancelled(self) -> None:
        """A request that the worker executes was cancelled: cancel the calls that can be for no other."""
        for call in list(self._open.values()):
            if call.parents and all(parent.cancelled for parent in call.parents):
                call.request.cancel()

    def parent_ended(self, parent: Request) -> None:
        """A request that the worker executed has its final response: cancel the streams that are for no other."""
        self._callers.discard(parent)
        for number in self._streams.pop(parent, ()):
            call = self._open.get(number)
            if call is not None and not any(other in self._streams for other in call.parents):
                call.request.cancel()

    def has_called(self, request: Request) -> bool:
        """Whether the worker has called models for `request`, which it executes."""
        return request in self._callers

    def responded(self, number: int, response: Response) -> None:
        """Send a response of a call to the worker; the worker's memory has the response from now on."""
        call = self._open.get(number)
        if call is None:  # the worker is gone
            response.release()
            return
        if response.error is not None:
            response.error = self._calls.error_of(call.request, response.error, was_refused=response.refused)
        if response.final:
            del self._open[number]
            self._calls.ended(call.request)
        self._memory.deliver_result(number, response, self._deliver)
        if not self._open:  # the model waits for this response, and for no other: send it at once
            self._flush()

    def _deliver(self, number: int, response: Response) -> None:
        """Send a response whose outputs the worker can read: inline, in regions that it knows, or just sent to it."""
        if response.error is not None:
            self._send(wire.CallResponded(number, response.final, _failure(response.error)))
            return
        if response.outputs is None:
            self._send(wire.CallResponded(number, response.final))
            return
        message = wire.ResponseMessage(response.outputs, response.parameters or {})
        if not response.leased:
            self._send(wire.CallResponded(number, response.final, message))
            return
        placed = [tensor for tensor in response.outputs if tensor.span is not None]
        byte_size = sum(tensor.byte_size for tensor in placed)
        if self._kept_byte_size + byte_size > self._kept_limit:
            response.release()
            error = Unavailable(
                f"the model keeps {self._kept_byte_size} bytes of results of its calls; with another {byte_size} bytes "
                f"these are more than {self._kept_limit}, which is the limit of a worker"
            )
            self._send(wire.CallResponded(number, response.final, _failure(error)))
            return
        first = self._last_lease + 1
        for tensor in placed:
            self._last_lease += 1
            self._results[self._last_lease] = tensor
        self._kept_byte_size += byte_size
        self._send(wire.CallResponded(number, response.final, message, first))

    def close(self) -> None:
        """The worker is gone: cancel its calls, and release the results."""
        calls, self._open = self._open, {}
        self._streams.clear()
        for call in calls.values():
            self._calls.ended(call.request)
            call.request.cancel()
        results, self._results = self._results, {}
        for tensor in results.values():
            tensor.release()
        self._kept_byte_size = 0


def _is_on_device(span: Span) -> bool:
    return span.lease.region.kind is RegionKind.DEVICE


def _failure(error: ServingError) -> wire.ResponseMessage:
    return wire.ResponseMessage(error_code=error.code.value, error_text=shortened(error.message))

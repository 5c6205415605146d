"""Calls of other models by processes that a model has forked, such as those of a pool: the worker makes them.

The connection of the worker to the kernel is not for its children (`backends/transport/channel.py`). So a child
gives the worker one end of a new connection for each call, and a thread of the worker makes the call, and sends the
responses back with their bytes. What was not forked has no cost: the first fork opens the door.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from backends.worker.model_calls import CallRequest, CallResponse, ModelCall, Result
from backends.worker.request import OutputValue
from kernel.errors import ErrorCode, InternalError, RequestCancelled, ServingError, worker_error
from shm.arrays import to_array, to_bytes
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from backends.worker.model_calls import ModelCalls

#: Before each message: its length.
_LENGTH = struct.Struct("<Q")

_NO_WORKER = "the process that has forked this one has ended"


class _Values(msgspec.Struct, array_like=True):
    """A tensor with its bytes."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes


class _AskedCall(msgspec.Struct, array_like=True, tag="call"):
    """A `CallRequest` whose inputs have their bytes."""

    model_name: str
    inputs: list[_Values]
    model_version: str
    outputs: list[str]
    id: str
    correlation_id: int | str
    flags: int
    priority: int
    timeout_us: int
    parameters: dict[str, str | int | bool | float]
    streaming: bool
    parents: list[int] | None
    blocking: bool | None
    trace_parent: int


class _AskedControl(msgspec.Struct, array_like=True, tag="control"):
    """An action with a model."""

    action: str
    model_name: str
    version: str
    config: str | None
    files: dict[str, bytes]
    unload_dependents: bool


class _Reply(msgspec.Struct, array_like=True):
    """A response to a call, or the result of an action."""

    outputs: list[_Values] = []
    parameters: dict[str, str | int | bool | float] = {}
    error_code: str = ""
    error_text: str = ""
    final: bool = True
    empty: bool = False
    ready: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_asked = msgspec.msgpack.Decoder(_AskedCall | _AskedControl).decode
_decode_response = msgspec.msgpack.Decoder(_Reply).decode


class ForkedChildren:
    """Makes the calls of the processes that this one forks."""

    def __init__(self, calls: ModelCalls, in_child: Callable[[ModelCalls], None]) -> None:
        """`in_child` gets the calls for a new process, in this process."""
        self._calls = calls
        self._in_child = in_child
        #: Our end, and that which children inherit; None before the first fork.
        self._door: tuple[socket.socket, socket.socket] | None = None
        self._serves = False
        self._pid = os.getpid()
        os.register_at_fork(before=self._before, after_in_parent=self._open, after_in_child=self._forked)

    def _before(self) -> None:
        if self._door is None and os.getpid() == self._pid:
            self._door = socket.socketpair()

    def _open(self) -> None:
        if self._door is not None and not self._serves:
            self._serves = True
            threading.Thread(target=self._serve, name="calls of forks", daemon=True).start()

    def _forked(self) -> None:
        if self._door is not None and self._pid == os.getppid():
            self._door[0].close()
            self._in_child(ForkedCalls(self._door[1]))

    def _serve(self) -> None:
        assert self._door is not None
        while True:
            try:
                _, fds, _, _ = socket.recv_fds(self._door[0], 1, 1)
            except OSError:
                return
            for fd in fds:
                connection = socket.socket(fileno=fd)
                threading.Thread(
                    target=self._serve_child, args=(connection,), name="call of a fork", daemon=True
                ).start()

    def _serve_child(self, connection: socket.socket) -> None:
        with connection:
            try:
                data = _receive(connection)
                asked = None if data is None else _decode_asked(data)
                if isinstance(asked, _AskedControl):
                    _send(connection, self._controlled(asked))
                elif asked is not None:
                    self._relay(connection, asked)
            except OSError:  # the child has ended
                return

    def _controlled(self, asked: _AskedControl) -> _Reply:
        try:
            ready = self._calls.control(
                asked.action, asked.model_name, version=asked.version, config=asked.config, files=asked.files,
                unload_dependents=asked.unload_dependents,
            )  # fmt: skip
        except ServingError as error:
            return _Reply(error_code=error.code.value, error_text=error.message)
        return _Reply(ready=ready)

    def _relay(self, connection: socket.socket, asked: _AskedCall) -> None:
        try:
            call = self._calls.start(_request_of(asked))
        except ServingError as error:
            _send(connection, _Reply(error_code=error.code.value, error_text=error.message))
            return
        final = False
        try:
            while not final:
                response = self._calls.wait(call)
                _send(connection, _reply_to(response))
                final = response.final
        finally:
            if not final:  # the child has ended, or wants no more
                self._calls.cancel(call)
                self._calls.discard(call)


class ForkedCalls:
    """The calls of a forked process. Implements `ModelCalls`."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._connections: dict[ModelCall, socket.socket] = {}

    def start(self, request: CallRequest) -> ModelCall:
        asked = _AskedCall(
            request.model_name, [_values_of(each) for each in request.inputs], request.model_version,
            list(request.outputs), request.id, request.correlation_id, request.flags, request.priority,
            request.timeout_us, dict(request.parameters), request.streaming,
            None if request.parents is None else list(request.parents), request.blocking, request.trace_parent,
        )  # fmt: skip
        call = ModelCall(0, streaming=request.streaming)
        self._connections[call] = self._ask(asked)
        return call

    def wait(self, call: ModelCall) -> CallResponse:
        if not call.responses:
            self._read(call)
        return call.responses.popleft()

    def take(self, call: ModelCall) -> CallResponse | None:
        return call.responses.popleft() if call.responses else None

    def notify(self, call: ModelCall, on_response: Callable[[], None]) -> None:
        call.on_response = on_response

        def read() -> None:
            while not call.ended:
                self._read(call)
                on_response()

        threading.Thread(target=read, name="responses", daemon=True).start()

    def cancel(self, call: ModelCall) -> None:
        connection = self._connections.get(call)
        if connection is not None:
            call.cancelled = True
            connection.shutdown(socket.SHUT_RDWR)

    def discard(self, call: ModelCall) -> None:
        call.discarded = True
        call.responses.clear()

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
        asked = _AskedControl(action, model_name, version, config, dict(files or {}), unload_dependents)
        with self._ask(asked) as connection:
            data = _receive(connection)
        if data is None:
            raise InternalError(_NO_WORKER)
        reply = _decode_response(data)
        if reply.error_code:
            raise worker_error(ErrorCode(reply.error_code), reply.error_text)
        return reply.ready

    def _ask(self, asked: _AskedCall | _AskedControl) -> socket.socket:
        """Return a connection over which the worker responds.

        Raises `InternalError` if the worker has ended, or this process may not open more files.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise InternalError(f"no connection for a call of another model: {error.strerror}") from None
        try:
            with theirs:
                socket.send_fds(self._door, [b"c"], [theirs.fileno()])
            _send(ours, asked)
        except OSError:
            ours.close()
            raise InternalError(_NO_WORKER) from None
        return ours

    def _read(self, call: ModelCall) -> None:
        """Wait for the next response of a call that has not ended, and add it."""
        connection = self._connections[call]
        try:
            data = _receive(connection)
        except OSError:
            data = None
        if data is None:
            error: ServingError = RequestCancelled() if call.cancelled else InternalError(_NO_WORKER)
            response = CallResponse(error=error, final=True)
        else:
            response = _response_of(_decode_response(data))
        if not call.discarded:
            call.responses.append(response)
        if response.final:
            call.ended = True
            del self._connections[call]
            connection.close()


def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    data = _encode(message)
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def _receive(connection: socket.socket) -> bytearray | None:
    """Return the next message, or None at the end of the connection."""
    head = _receive_exactly(connection, _LENGTH.size)
    return None if head is None else _receive_exactly(connection, _LENGTH.unpack(head)[0])


def _receive_exactly(connection: socket.socket, byte_size: int) -> bytearray | None:
    data = bytearray(byte_size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            return None
        rest = rest[count:]
    return data


def _values_of(value: OutputValue | Tensor) -> _Values:
    """Return an input of a call with its bytes."""
    if isinstance(value, Tensor):
        return _Values(value.name, value.datatype, list(value.shape), bytes(value.raw()))
    array: Any = value.array
    if array.dtype is None:
        raise InternalError(f"input '{value.name}' is on a device, of which a forked process has none")
    return _Values(value.name, value.datatype, list(array.shape), bytes(to_bytes(array)))


def _request_of(asked: _AskedCall) -> CallRequest:
    """Return a call for the worker. Its results are on the host."""
    return CallRequest(
        asked.model_name, [_value_of(each) for each in asked.inputs], asked.model_version, asked.outputs, asked.id,
        asked.correlation_id, asked.flags, asked.priority, asked.timeout_us, asked.parameters, asked.streaming,
        asked.parents, asked.blocking, asked.trace_parent, on_device=False,
    )  # fmt: skip


def _value_of(values: _Values) -> OutputValue:
    """Return an input of a call as a model gives it. BF16, which NumPy lacks, is an array of uint16."""
    kind = "UINT16" if values.datatype == "BF16" else values.datatype
    return OutputValue(values.name, values.datatype, to_array(kind, values.shape, values.data))


def _reply_to(response: CallResponse) -> _Reply:
    error = response.error
    return _Reply(
        [_values_of(tensor) for tensor in response.outputs],
        dict(response.parameters),
        "" if error is None else error.code.value,
        "" if error is None else error.message,
        response.final,
        response.empty,
    )


def _response_of(reply: _Reply) -> CallResponse:
    if reply.error_code:
        error = worker_error(ErrorCode(reply.error_code), reply.error_text)
        return CallResponse(error=error, final=reply.final)
    outputs = [Tensor(each.name, each.datatype, each.shape, memoryview(bytearray(each.data))) for each in reply.outputs]
    return CallResponse(outputs, reply.parameters, final=reply.final, empty=reply.empty)

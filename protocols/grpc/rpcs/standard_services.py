"""The services that are not Triton's own: grpc.health.v1, and grpc.reflection.v1 and v1alpha.

Health has one status for the whole server, as in Triton. Check ignores which service is asked for, as Triton does;
Watch, which Triton does not have, keeps to the protocol. Reflection says what the server offers, from the descriptor
pool that its messages are in.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from kernel.config.pool import POOL
from kernel.errors import ServingError
from protocols.grpc.generated import reflection_v1_pb2 as v1
from protocols.grpc.generated import reflection_v1alpha_pb2 as v1alpha
from protocols.grpc.generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from protocols.grpc.rpc import receive, translated_errors, unary

if TYPE_CHECKING:
    from types import ModuleType

    from google.protobuf.descriptor import FileDescriptor
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpclib.server import Stream

    from kernel.serving.interface import KernelInterface
    from protocols.grpc.rpc import Caller, OpenCalls

#: How often a watched status is checked: there is no event for a change, and orchestrators ask as often.
WATCH_INTERVAL_S = 1.0

#: What can be watched; the empty name is the server as a whole.
WATCHED_SERVICES = ("", "inference.GRPCInferenceService", "grpc.health.v1.Health")


class HealthService:
    """`grpc.health.v1.Health`; Check ignores the name of the service."""

    def __init__(self, kernel: KernelInterface, calls: OpenCalls) -> None:
        self._kernel = kernel
        self._calls = calls

    def __mapping__(self) -> dict[str, Handler]:
        return {
            "/grpc.health.v1.Health/Check": unary(self.check, HealthCheckRequest, HealthCheckResponse),
            "/grpc.health.v1.Health/Watch": Handler(
                self._watch, Cardinality.UNARY_STREAM, HealthCheckRequest, HealthCheckResponse
            ),
        }

    async def check(self, message: HealthCheckRequest, caller: Caller) -> HealthCheckResponse:
        """Return whether the server is ready. Raises `Unavailable` while it stops."""
        return HealthCheckResponse(status=_status(await self._kernel.server_is_ready()))

    async def _watch(self, stream: Stream[HealthCheckRequest, HealthCheckResponse]) -> None:
        with translated_errors("Watch"):
            call = WatchCall(self._kernel, stream)
            with self._calls.stoppable(call):
                await call.run()


class WatchCall:
    """One Watch call: the status now, and again whenever it has changed, until the client goes."""

    def __init__(
        self,
        kernel: KernelInterface,
        stream: Stream[HealthCheckRequest, HealthCheckResponse],
        interval_s: float = WATCH_INTERVAL_S,
    ) -> None:
        self._kernel = kernel
        self._stream = stream
        self._interval_s = interval_s
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Send statuses until the server stops."""
        message = await receive(self._stream)
        known = message is None or message.service in WATCHED_SERVICES
        shown: HealthCheckResponse.ServingStatus | None = None
        while True:
            stopped = self._stopped.is_set()
            status = _status(not stopped and await self._ready()) if known else HealthCheckResponse.SERVICE_UNKNOWN
            if status is not shown:
                await self._stream.send_message(HealthCheckResponse(status=status))
                shown = status
            if stopped:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._stopped.wait()

    def stop(self) -> None:
        """Send the last status, which says that the server stops, and end."""
        self._stopped.set()

    async def _ready(self) -> bool:
        try:
            return await self._kernel.server_is_ready()
        except ServingError:  # the server exits
            return False


def _status(ready: bool) -> HealthCheckResponse.ServingStatus:
    return HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING


#: The services, as `list_services` returns them.
SERVICES = (
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
)


class ReflectionService:
    """Both versions of the service; they differ by the name of their package only."""

    def __mapping__(self) -> dict[str, Handler]:
        return {
            f"/grpc.reflection.{name}.ServerReflection/ServerReflectionInfo": Handler(
                _handler(messages),
                Cardinality.STREAM_STREAM,
                messages.ServerReflectionRequest,
                messages.ServerReflectionResponse,
            )
            for name, messages in (("v1", v1), ("v1alpha", v1alpha))
        }


def _handler(messages: ModuleType) -> Any:
    """Return the handler that uses `messages`: each request has one response."""

    async def handle(stream: Stream[Any, Any]) -> None:
        with translated_errors("ServerReflectionInfo"):
            while (request := await _receive(stream)) is not None:
                await stream.send_message(response_to(request, messages.ServerReflectionResponse, POOL))

    return handle


async def _receive(stream: Stream[Any, Any]) -> Any:
    """Return the next request, None when the client has sent its last one. Raises `GRPCError`."""
    try:
        return await stream.recv_message()
    except DecodeError:
        text = "the message is no ServerReflectionRequest: it is cut short or damaged"
        raise GRPCError(Status.INVALID_ARGUMENT, text) from None


def response_to(request: Any, response_type: Any, pool: DescriptorPool) -> Any:
    """Return the response, a message of `response_type`, to one reflection request."""
    response = response_type(valid_host=request.host, original_request=request)
    try:
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in SERVICES:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                _write_file(response, pool.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                _write_file(response, _file_of_symbol(pool, request.file_containing_symbol))
            case "file_containing_extension":
                asked = request.file_containing_extension
                extended = pool.FindMessageTypeByName(asked.containing_type)
                extension = pool.FindExtensionByNumber(extended, asked.extension_number)
                _write_file(response, pool.FindFileContainingSymbol(extension.full_name))
            case "all_extension_numbers_of_type":
                extended = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                numbers = response.all_extension_numbers_response
                numbers.base_type_name = extended.full_name
                numbers.extension_number.extend(sorted(found.number for found in pool.FindAllExtensions(extended)))
            case _:
                _write_error(response, Status.INVALID_ARGUMENT, "the request asks for nothing")
    except KeyError as error:
        _write_error(response, Status.NOT_FOUND, str(error.args[0]))
    return response


def _file_of_symbol(pool: DescriptorPool, symbol: str) -> FileDescriptor:
    """Return the file that defines a symbol, which may be a method. Raises `KeyError`."""
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        service, _, method = symbol.rpartition(".")
        if method not in pool.FindServiceByName(service).methods_by_name:
            raise
        return pool.FindFileContainingSymbol(service)


def _write_file(response: Any, file: FileDescriptor) -> None:
    """Write a file and all that it imports; imported files are first."""
    response.file_descriptor_response.file_descriptor_proto.extend(_with_imports(file, {}).values())


def _with_imports(file: FileDescriptor, found: dict[str, bytes]) -> dict[str, bytes]:
    for imported in file.dependencies:
        if imported.name not in found:
            _with_imports(imported, found)
    found[file.name] = file.serialized_pb
    return found


def _write_error(response: Any, status: Status, text: str) -> None:
    response.error_response.error_code = status.value
    response.error_response.error_message = text

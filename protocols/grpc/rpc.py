"""What every RPC does around its function: receive the request, send the response, turn errors into a status.

The only place where a `ServingError` becomes a `GRPCError`. Any other exception is a bug; it is logged with a number
that the client gets. `OpenCalls` says what happens to calls when the server stops: new inference is refused, and calls
without an end are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import msgspec
from google.protobuf.message import DecodeError, Message
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from kernel.errors import ServingError, Unavailable
from kernel.observe.internal_errors import unexpected_error
from protocols.access import Peer
from protocols.grpc.grpclib_internals import StreamClosedError, status_text, stream_of
from protocols.listening import is_local
from protocols.status import grpc_status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from grpclib.server import Stream

    from protocols.grpc.handlers import HandlerCall
    from protocols.intake import Intake

RequestT = TypeVar("RequestT", bound=Message)

ResponseT = TypeVar("ResponseT", bound=Message)


class Caller(msgspec.Struct, frozen=True):
    """Who makes a call."""

    #: The peer's address as the transport gives it.
    peer: object
    #: The headers of the call that are not gRPC's own, by names in lower case.
    metadata: Mapping[str, str | bytes] = {}
    #: Who the peer is.
    client: Peer = Peer(None)

    @property
    def identity(self) -> str:
        """The peer as the owner of regions."""
        return self.client.identity

    @property
    def local(self) -> bool:
        """Whether the peer is on this machine, as far as its address says."""
        return is_local(self.peer)

    def header(self, name: str) -> bytes | None:
        """Return the value of a header by its name in any case of letters, None if it is absent."""
        value = self.metadata.get(name.lower())
        return value.encode("latin-1") if isinstance(value, str) else value


def unary(
    function: Callable[[RequestT, Caller], Awaitable[ResponseT]],
    request_type: type[RequestT],
    response_type: type[ResponseT],
) -> Handler:
    """Return the handler of an RPC that responds to one message with one."""

    async def handle(stream: Stream[RequestT, ResponseT]) -> None:
        with translated_errors(request_type.DESCRIPTOR.name):
            message = await receive(stream)
            if message is None:
                raise GRPCError(Status.UNIMPLEMENTED, "the call ended without a request message")
            assert stream.metadata is not None, "grpclib sets it before the call begins"
            call = cast("HandlerCall", stream_of(stream))
            caller = Caller(stream.peer.addr(), stream.metadata, call.peer)
            await stream.send_message(await function(message, caller))

    return Handler(handle, Cardinality.UNARY_UNARY, request_type, response_type)


async def receive(stream: Stream[RequestT, ResponseT]) -> RequestT | None:
    """Return the next message of the client, None when it has sent its last one. Raises `GRPCError`."""
    try:
        return await stream.recv_message()
    except DecodeError as error:
        raise grpc_error(error, "") from None


def grpc_error(error: Exception, title: str) -> GRPCError:
    """Return the status that a client gets for `error`; `title` names the RPC in the log."""
    if isinstance(error, GRPCError):
        return error
    if isinstance(error, ServingError):
        return GRPCError(grpc_status(error), status_text(error.text))
    if isinstance(error, DecodeError):
        return GRPCError(Status.INTERNAL, "Unable to parse request")
    return grpc_error(unexpected_error(title, error), title)


@contextlib.contextmanager
def translated_errors(title: str) -> Iterator[None]:
    """Raise what the block raises as `GRPCError`; `title` names the RPC in the log."""
    try:
        yield
    except GRPCError:
        raise
    except StreamClosedError:
        # The client reset the call while the response was sent: grpclib has cancelled the handler, or is about to,
        # and logs anything but a cancellation as an error.
        raise asyncio.CancelledError from None
    except Exception as error:
        raise grpc_error(error, title) from None


class ServerShuttingDown(Unavailable):
    """An inference call arrived, or a stream was still open, while the server stops."""

    def __init__(self) -> None:
        super().__init__("GRPC server is shutting down and has stopped accepting new requests.")


class LongCall(Protocol):
    """A call that has no end of its own: it waits for its client, or for something to change."""

    def stop(self) -> None:
        """End soon: accept nothing new, finish what was started."""


class OpenCalls:
    """Records the calls that do not end by themselves, and whether new ones are accepted."""

    def __init__(self) -> None:
        self.stopping = False
        self._long_calls: set[LongCall] = set()
        self._intakes: list[Intake] = []

    def add_intake(self, intake: Intake) -> None:
        """Let `intake` take no more requests once the server stops."""
        self._intakes.append(intake)

    def check_accepting(self) -> None:
        """Raise `ServerShuttingDown` once the server stops."""
        if self.stopping:
            raise ServerShuttingDown

    @contextlib.contextmanager
    def stoppable(self, call: LongCall) -> Iterator[None]:
        """Stop `call` when the server stops while the block runs; at once if it is stopping already."""
        self._long_calls.add(call)
        if self.stopping:
            call.stop()
        try:
            yield
        finally:
            self._long_calls.discard(call)

    def stop(self) -> None:
        """Accept no more inference calls, and stop the long calls."""
        self.stopping = True
        for intake in self._intakes:
            intake.refusal = ServerShuttingDown()
        for call in tuple(self._long_calls):
            call.stop()

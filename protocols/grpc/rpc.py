"""What every RPC does around its function: receive, answer, and turn errors into a status.

The only place where a `ServingError` becomes a `GRPCError`; whatever else is raised is a bug, which is
logged with a number that the client is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from kernel.errors import ServingError
from protocols.frontend import is_local
from protocols.grpc.grpclib_internals import StreamClosedError
from protocols.grpc.text import status_text
from protocols.status import GRPC_STATUS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from grpclib.server import Stream

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)


class Caller(msgspec.Struct, frozen=True):
    """Who makes a call."""

    #: The peer's address as the transport gives it.
    peer: object

    @property
    def local(self) -> bool:
        """Whether the peer is on this machine, as far as can be told."""
        return is_local(self.peer)


def unary(
    function: Callable[[RequestT, Caller], Awaitable[ReplyT]],
    request_type: type[RequestT],
    reply_type: type[ReplyT],
) -> Handler:
    """Return the handler of an RPC that answers one message with one."""

    async def handle(stream: Stream[RequestT, ReplyT]) -> None:
        with translated_errors(request_type.DESCRIPTOR.name):
            message = await receive(stream)
            if message is None:
                raise GRPCError(Status.UNIMPLEMENTED, "the call ended without a request message")
            await stream.send_message(await function(message, Caller(stream.peer.addr())))

    return Handler(handle, Cardinality.UNARY_UNARY, request_type, reply_type)


async def receive(stream: Stream[RequestT, ReplyT]) -> RequestT | None:
    """Return the next message of the client, None where it has sent its last. Raises `GRPCError`."""
    try:
        return await stream.recv_message()
    except DecodeError as error:
        raise grpc_error(error, "") from None


def grpc_error(error: Exception, title: str) -> GRPCError:
    """Return how a client is told of `error`; `title` says in the log what was asked for."""
    if isinstance(error, GRPCError):
        return error
    if isinstance(error, ServingError):
        return GRPCError(GRPC_STATUS[error.code], status_text(error.message))
    if isinstance(error, DecodeError):
        return GRPCError(Status.INTERNAL, "Unable to parse request")
    number = secrets.token_hex(4)
    logger.error("%s failed, error number %s", title, number, exc_info=error)
    return GRPCError(Status.INTERNAL, f"internal error {number}: the server's log says more under this number")


@contextlib.contextmanager
def translated_errors(title: str) -> Iterator[None]:
    """Raise what the block raises as `GRPCError`; `title` says in the log what was asked for."""
    try:
        yield
    except GRPCError:
        raise
    except StreamClosedError:
        # The client reset the call while the answer was on its way: grpclib has cancelled, or is about
        # to, and takes anything but a cancellation for a failure to obey.
        raise asyncio.CancelledError from None
    except Exception as error:
        raise grpc_error(error, title) from None

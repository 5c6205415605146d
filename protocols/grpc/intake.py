"""Messages of ModelInfer and ModelStreamInfer as requests, and metadata of calls as parameters of their requests.

Which metadata that is says --grpc-header-forward-pattern.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf.message import DecodeError

from kernel.serving.request import Request
from protocols.forwarding import ForwardedHeaders, make_forwarder
from protocols.grpc.codec import decode_request, parse_soon, start_request
from protocols.grpc.framing import CompressedMessage, RefusedMessage
from protocols.grpc.grpclib_internals import decode_metadata
from protocols.grpc.large_request import DECODE_MESSAGE, DecodeMessageArguments
from protocols.grpc.prepared import PreparedMessages, model_of, names_at_start
from protocols.grpc.rpc import grpc_error
from protocols.grpc.wire_format import first_raw_content
from protocols.intake import Decoded, HelperJob, Intake
from protocols.large_requests import sources_of

if TYPE_CHECKING:
    from kernel.memory.input_placement import ReceiveBuffer
    from kernel.serving.interface import KernelInterface
    from kernel.serving.route import ModelRoute
    from protocols.forwarding import HeaderForwarder
    from protocols.grpc.framing import ReceivedMessage
    from protocols.grpc.h2.headers import RequestHead
    from shm.tensor import Buffer


class MetadataForwarder:
    """Chooses metadata by its names. Headers of gRPC itself are not metadata, except the user agent."""

    def __init__(self, forwarder: HeaderForwarder) -> None:
        self._forwarder = forwarder

    def of_call(self, request_head: RequestHead) -> dict[str, str]:
        """Return the parameters that the headers of a call, or a stream, become. Raises `ReservedHeader`."""
        user_agent = next((value for name, value in request_head.fields if name == "user-agent"), None)
        headers = [(name, _text(value)) for name, value in decode_metadata(request_head.fields).items()]
        if user_agent is not None:
            headers.append(("user-agent", _text(user_agent)))
        return self._forwarder.parameters(headers)


def make_metadata_forwarder(pattern: str) -> MetadataForwarder | None:
    """Return the forwarder for the value of the flag, None where nothing is forwarded. Raises `BadOption`."""
    forwarder = make_forwarder(pattern)
    return None if forwarder is None else MetadataForwarder(forwarder)


def _text(value: str | bytes) -> str:
    """Return a value, which was decoded as Latin-1, in the form that `HeaderForwarder` expects."""
    octets = value if isinstance(value, bytes) else value.encode("latin-1")
    return octets.decode(errors="surrogateescape")


#: What Triton calls the unary call in errors.
ENTRY_POINT = "ModelInfer RPC"

#: Enough for the name and the version of a model at the start of a message.
_START_BYTE_SIZE = 1024


class MessageOptions(msgspec.Struct, frozen=True):
    """What the response to a message needs to know; a `PreparedMessage` has it, too."""

    wants_empty_final: bool
    #: Whether the model is decoupled.
    decoupled: bool


class MessageIntake(Intake):
    """The intake of one of the two RPCs."""

    def __init__(self, kernel: KernelInterface, forwarder: MetadataForwarder | None = None, *, streaming: bool) -> None:
        """Without `forwarder` no metadata becomes parameters."""
        super().__init__(kernel, None if forwarder is None else self._forwarded)
        self._forwarder = forwarder
        self._streaming = streaming
        self.prepared = PreparedMessages()
        self.match = self.prepared.match

    def receive_buffer(self, message_start: bytes, byte_size: int) -> ReceiveBuffer:
        """Return a buffer for a message of `byte_size` bytes that begins with `message_start`.

        It is in memory of the model that the first bytes name, or in memory for a helper. The caller releases it when
        the request was submitted or refused. Raises `ServingError`: the model does not exist, or there is no memory.
        """
        kernel = self.kernel
        matched = self.prepared.match_start(message_start, byte_size, kernel.catalog.generation)
        buffer = None
        if matched is not None:
            buffer = kernel.receive_buffer(matched[0], byte_size, matched[1])
        elif (target := model_of(message_start)) is not None:
            buffer = kernel.receive_buffer(self._route(*target), byte_size, first_raw_content(message_start))
        return buffer or kernel.message_buffer(byte_size)

    def _route(self, name: str, version: str) -> ModelRoute:
        """Return the route of what a message names. Raises `ServingError`."""
        if self._streaming:
            return self.kernel.route(name, version)
        return self.kernel.unary_route(name, version, ENTRY_POINT)

    def _forwarded(self, call: Any) -> ForwardedHeaders | None:
        assert self._forwarder is not None, "nothing is forwarded"
        parameters = self._forwarder.of_call(call.request_head)
        return ForwardedHeaders(parameters) if parameters else None

    # ---- protocols.intake.Intake --------------------------------------------------------------

    def decode(self, call: Any, message: ReceivedMessage, received_in: ReceiveBuffer | None) -> Decoded | None:
        if isinstance(message, (CompressedMessage, RefusedMessage)) or (
            received_in is not None and not received_in.of_model
        ):
            return None
        try:
            found = parse_soon(message)
        except DecodeError as error:
            raise grpc_error(error, "") from None
        if found is None:
            return None
        parsed, raw_contents = found
        request = start_request(parsed, call, streaming=self._streaming)
        call.request = request  # its names are known where the rest is wrong
        route = self._route(request.model_name, request.model_version)  # before its tensors are decoded, as in Triton
        if not self._streaming:
            request.entry_point = ENTRY_POINT
        call.decoded = MessageOptions(False, route.spec.decoupled)
        wants_empty_final = decode_request(parsed, request, raw_contents)
        return Decoded(request, route, MessageOptions(wants_empty_final, route.spec.decoupled))

    def keep(self, call: Any, message: Buffer, decoded: Decoded) -> None:
        assert decoded.route is not None, "a message is kept without its model"
        self.prepared.add(message, decoded.request, decoded.route, wants_empty_final=decoded.options.wants_empty_final)

    def helper_job(
        self, call: Any, message: ReceivedMessage, received_in: ReceiveBuffer | None
    ) -> tuple[Request, HelperJob]:
        kernel = self.kernel
        request = call.request = Request("", [], call, streaming=self._streaming)
        if not self._streaming:
            request.entry_point = ENTRY_POINT
        if isinstance(message, RefusedMessage):
            request.model_name, request.model_version, request.id = names_at_start(message.start)
            raise message.error
        encoding = ""
        route: ModelRoute | None = None
        content: Buffer
        if isinstance(message, CompressedMessage):
            content, encoding = message.content, message.encoding
        else:
            content = message
            target = model_of(bytes(message[:_START_BYTE_SIZE]))
            if target is not None:
                request.model_name, request.model_version = target
                route = self._route(*target)
        arguments = msgspec.msgpack.encode(
            DecodeMessageArguments(self._streaming, encoding, kernel.settings.max_decompression_ratio)
        )
        return request, HelperJob(DECODE_MESSAGE, arguments, sources_of(kernel, content, received_in), route)

    def read_options(self, octets: bytes, route: ModelRoute) -> MessageOptions:
        return MessageOptions(bool(octets), route.spec.decoupled)

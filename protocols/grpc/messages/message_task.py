"""Starts to decode a request message in a helper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocols.grpc.messages.prepared import model_of
from protocols.grpc.messages.tasks import DECODE_MESSAGE, DecodeMessageArguments
from protocols.grpc.special_messages import CompressedMessage, RefusedMessage
from protocols.helpers.request_task import RequestTask, sources_of

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from protocols.grpc.special_messages import ReceivedMessage
    from protocols.helpers.request_task import Preparing
    from shm.tensor import Buffer

#: Enough for the name and the version of a model at the start of a message.
_START_BYTE_SIZE = 1024


def message_task(
    kernel: Kernel, request: Request, caller: Preparing, message: ReceivedMessage, received_in: ReceiveBuffer | None
) -> RequestTask:
    """Return the task that decodes `message` into `request`. Raises `ServingError` for one that is refused.

    `received_in` is the buffer that has the message, if any; it stays the caller's to release.
    """
    if isinstance(message, RefusedMessage):
        raise message.error
    encoding = ""
    model: Model | None = None
    content: Buffer
    if isinstance(message, CompressedMessage):
        content, encoding = message.content, message.encoding
    else:
        content, model = message, _model_of(kernel, bytes(message[:_START_BYTE_SIZE]), request)
    arguments = msgspec.msgpack.encode(
        DecodeMessageArguments(request.streaming, encoding, kernel.settings.max_decompression_ratio)
    )
    sources = sources_of(kernel, content, received_in)
    return RequestTask(kernel, model, request, caller, DECODE_MESSAGE, arguments, sources)


def _model_of(kernel: Kernel, message_start: bytes, request: Request) -> Model | None:
    """Return the model that the message names at its start; None if it does not. Raises `ServingError`."""
    target = model_of(message_start)
    if target is None:
        return None
    request.model_name, request.model_version = target
    if request.streaming:
        return kernel.resolve(*target)
    return kernel.resolve_unary(*target, request.entry_point)

"""Where a large message is received: in memory of its model, which the first bytes of the message name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import ServingError
from protocols.grpc.messages.prepared import model_of
from protocols.grpc.messages.raw_contents import first_raw_content

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.kernel import Kernel


def receive_buffer_for(
    kernel: Kernel, message_start: bytes, byte_size: int, *, streaming: bool
) -> ReceiveBuffer | None:
    """Return a buffer for a message of `byte_size` bytes that begins with `message_start`, None for any memory.

    The caller releases it when the request was submitted or refused.
    """
    target = model_of(message_start)
    if target is None:
        return None
    try:
        model = kernel.resolve(*target) if streaming else kernel.resolve_unary(*target, "")
    except ServingError:
        return None  # the client gets the error when the message has been received
    return kernel.receive_buffer(model, byte_size, first_raw_content(message_start))

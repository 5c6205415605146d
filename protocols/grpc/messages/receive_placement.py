"""Where a large message is received: in memory of the model that it is for, which its first bytes name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import ServingError
from protocols.grpc.messages.prepared import model_of
from protocols.grpc.messages.raw import first_raw_content

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.kernel import Kernel


def place_for(kernel: Kernel, head: bytes, byte_size: int, *, streaming: bool) -> ReceiveBuffer | None:
    """Return memory for a message of `byte_size` bytes that begins with `head`, None where any will do.

    The caller releases it once the request has been started, or refused.
    """
    target = model_of(head)
    if target is None:
        return None
    try:
        model = kernel.resolve(*target) if streaming else kernel.resolve_unary(*target, "")
    except ServingError:
        return None  # the caller gets the error when the message has been received
    return kernel.receive_buffer(model, byte_size, first_raw_content(head))

"""Where a large message is received: in memory of its model, which the first bytes name, or in memory for a helper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.grpc.messages.prepared import model_of
from protocols.grpc.messages.raw_contents import first_raw_content

#: What Triton calls the unary call in errors.
ENTRY_POINT = "ModelInfer RPC"

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.kernel import Kernel


def receive_buffer_for(kernel: Kernel, message_start: bytes, byte_size: int, *, streaming: bool) -> ReceiveBuffer:
    """Return a buffer for a message of `byte_size` bytes that begins with `message_start`.

    The caller releases it when the request was submitted or refused. Raises `ServingError`: the model does not exist,
    or there is no memory.
    """
    target = model_of(message_start)
    buffer = None
    if target is not None:
        model = kernel.resolve(*target) if streaming else kernel.resolve_unary(*target, ENTRY_POINT)
        buffer = kernel.receive_buffer(model, byte_size, first_raw_content(message_start))
    return buffer or kernel.message_buffer(byte_size)

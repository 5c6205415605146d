"""Where a large message is received: in memory of the model that it is for, which its first bytes name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import ServingError
from protocols.grpc.messages.prepared import model_of
from protocols.grpc.messages.raw import first_raw_content

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import Body
    from kernel.serving.kernel import Kernel


def place_for(kernel: Kernel, head: bytes, byte_size: int, *, streaming: bool) -> Body | None:
    """Return memory for a message of `byte_size` bytes that begins with `head`, None where any will do.

    The caller releases it once the request has been started, or refused.
    """
    target = model_of(head)
    if target is None:
        return None
    try:
        model = kernel.resolve(*target)
    except ServingError:
        return None  # told when the message has come
    if model.spec.decoupled and not streaming:
        return None
    return kernel.receive(model, byte_size, first_raw_content(head))

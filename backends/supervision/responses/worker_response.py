"""Makes the response of a request from what its worker has sent, which is not trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.transport.texts import MAX_TEXT_BYTES
from kernel.errors import ErrorCode, worker_error
from kernel.serving.response import Response

if TYPE_CHECKING:
    from backends.supervision.remote_memory import RemoteMemory
    from backends.supervision.worker_memory import WorkerMemory
    from backends.transport import wire
    from kernel.serving.request import Request


def worker_response(
    request: Request,
    message: wire.ResponseMessage | None,
    version: str,
    memory: WorkerMemory | RemoteMemory,
    *,
    final: bool,
) -> Response:
    """Return the response, which owns the leases of its outputs in `memory`.

    Without a `message` it only marks the end. `version` is that of the model. Raises ValueError, and keeps no lease,
    for a message that breaks the protocol.
    """
    if message is None:
        return Response(request.model_name, version, request.id, final=final)
    if message.error_code:
        if len(message.error_text) > MAX_TEXT_BYTES:
            raise ValueError(f"an error text of {len(message.error_text)} characters")
        error = worker_error(ErrorCode(message.error_code), message.error_text)
        error.before_queueing = message.error_before_queueing
        return Response(request.model_name, version, request.id, error=error, final=final)
    leased = False
    try:
        for tensor in message.outputs:
            if tensor.span is not None:
                memory.take_output(request, tensor, tensor.span, final=final)
                leased = leased or tensor.span is not None
            elif tensor.data is None:
                raise ValueError(f"output '{tensor.name}' has no bytes")
    except ValueError:
        for tensor in message.outputs:
            tensor.release()
        raise
    return Response(request.model_name, version, request.id, message.outputs, message.parameters, None, final, leased)

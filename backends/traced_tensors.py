"""Sends the tensors of requests whose traces have tensors. Other requests are not affected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backends.transport import wire
from kernel.tracing.trace import BACKEND_OUTPUT, QUEUE_INPUT, TRACED_BYTE_SIZE, TracedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.worker.request import OutputValue, WorkerRequest


def send_inputs(requests: Sequence[WorkerRequest], send: Callable[[wire.ToKernel], None]) -> None:
    """Send the inputs of the requests in a batch whose tensors are traced, before the model may change them."""
    for request in requests:
        trace = request.ref.trace
        if trace is not None and trace.tensors:
            send(wire.TensorsTraced(request.ref.number, [
                TracedTensor(
                    QUEUE_INPUT, tensor.name, tensor.datatype, list(tensor.shape),
                    bytes(memoryview(tensor.data or b"").cast("B")[:TRACED_BYTE_SIZE]), tensor.byte_size,
                )
                for tensor in request.inputs
            ]))  # fmt: skip


def send_outputs(request: WorkerRequest, outputs: Sequence[OutputValue], send: Callable[[wire.ToKernel], None]) -> None:
    """Send the outputs of a request whose tensors are traced."""
    send(wire.TensorsTraced(request.ref.number, [
        TracedTensor(
            BACKEND_OUTPUT, output.name, output.datatype, list(output.array.shape), *_beginning(output)
        )
        for output in outputs
        if request.wants(output.name)
    ]))  # fmt: skip


def _beginning(output: OutputValue) -> tuple[bytes, int]:
    """Return the first bytes of an output, in the form of the protocols, and how many it has."""
    array: Any = output.array
    if array.dtype is None:  # it is on a device, and perhaps not computed yet
        return b"", int(array.nbytes)
    if output.datatype != "BYTES":
        flat = array.reshape(-1)[:TRACED_BYTE_SIZE]  # of each element at least one byte
        return np.ascontiguousarray(flat).tobytes()[:TRACED_BYTE_SIZE], int(array.nbytes)
    beginning = b""
    byte_size = 0
    for element in array.reshape(-1).tolist():
        octets = element if isinstance(element, bytes) else str(element).encode()
        byte_size += 4 + len(octets)
        if len(beginning) < TRACED_BYTE_SIZE:
            beginning += len(octets).to_bytes(4, "little") + octets[:TRACED_BYTE_SIZE]
    return beginning[:TRACED_BYTE_SIZE], byte_size

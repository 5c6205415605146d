"""The beginning of a tensor for a trace. Pure.

The kernel reads only tensors that are in messages. Those in shared memory are read by the worker that has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.tracing.trace import TRACED_BYTE_SIZE, TracedTensor

if TYPE_CHECKING:
    from shm.tensor import Tensor


def traced_inline(activity: str, tensor: Tensor) -> TracedTensor:
    """Return what a trace shows of `tensor`: without data if it is not inline."""
    data = b"" if tensor.data is None else bytes(memoryview(tensor.data)[:TRACED_BYTE_SIZE])
    return TracedTensor(activity, tensor.name, tensor.datatype, list(tensor.shape), data, tensor.byte_size)

"""What a model gives to `InferenceRequest` beside tensors: flags, the memory that it prefers, a trace."""

from __future__ import annotations

import enum
from typing import Final

from backends.python.conversions import as_int64
from backends.python.failures import incompatible_arguments

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2


class MemoryType(enum.IntEnum):
    """Where tensors are."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1

    __str__ = enum.Enum.__str__  # as Triton's enumerations show themselves


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """The memory that a model prefers for the outputs of a request that it creates."""

    __slots__ = ("_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        device_id = as_int64(preferred_device_id)
        if device_id is None or not isinstance(preferred_memory_type, MemoryType):
            signature = (
                "PreferredMemory(preferred_memory_type: triton::backend::python::PreferredMemory::MemoryType, "
                "preferred_device_id: int = 0)"
            )
            raise incompatible_arguments("__init__", signature, preferred_memory_type, preferred_device_id)
        self._memory_type = preferred_memory_type
        self._device_id = device_id

    @property
    def device_id(self) -> int | None:
        """The GPU; None for memory of the host."""
        return self._device_id if self._memory_type is MemoryType.TRITONSERVER_MEMORY_GPU else None


class InferenceTrace:
    """The trace of a request."""

    __slots__ = ("_context", "request_number")

    def __init__(self, context: str | None = None) -> None:
        self._context = context
        #: The number of the request that has the trace; 0 for a trace that the model has made.
        self.request_number = 0

    def get_context(self) -> str | None:
        """Return the OpenTelemetry context as JSON, or None if the request has none."""
        return self._context


def is_list_of(kinds: tuple[type, ...], values: object) -> bool:
    """Return whether `values` is a list or tuple of nothing but instances of `kinds`."""
    if not isinstance(values, (list, tuple)):
        return False
    for value in values:  # noqa: SIM110 - `all` with a generator takes four times as long, and calls are many
        if not isinstance(value, kinds):
            return False
    return True

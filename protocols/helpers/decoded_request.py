"""What a helper finds out about a request that it decodes, as a message to the kernel process. Pure.

Both protocols use it. The tensors' bytes follow in memory that the kernel process chooses when it knows their sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument
from kernel.serving.helper_tasks import TaskResult
from shm.tensor import RequestedOutput, Tensor, decode_lease, encode_lease

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.helper_tasks import TaskSteps
    from kernel.serving.request import Request
    from kernel.serving.response import ParameterValue
    from shm.tensor import Buffer

#: Each tensor begins at a multiple of this many bytes, as in `kernel.memory.receive_buffer`.
ALIGNMENT = 64

#: The most bytes of names, parameters and shapes of one request. They are decoded on the event loop.
MAX_DESCRIPTION_BYTE_SIZE = 1 << 20


class DecodedRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """The fields of a request. An input without a client's region has its bytes in the memory for the result."""

    inputs: list[Tensor]
    #: The most bytes that each input takes there; 0 for one in a client's region.
    byte_sizes: list[int]
    outputs: list[RequestedOutput] = []
    id: str = ""
    parameters: dict[str, str | int | bool | float] = {}
    correlation_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    #: What the front door needs for the response, encoded by itself.
    response_options: bytes = b""
    #: As the client gave them. Not used where the front door knows the model before the helper does.
    model_name: str = ""
    model_version: str = ""

    @property
    def byte_size(self) -> int:
        """The bytes of memory for the result."""
        return sum(map(aligned, self.byte_sizes))

    def fill(self, request: Request) -> None:
        """Set the fields of `request`, except for the bytes of its inputs."""
        parameters: dict[str, ParameterValue] = dict(self.parameters)
        request.inputs, request.outputs, request.id, request.parameters = self.inputs, self.outputs, self.id, parameters
        request.correlation_id = self.correlation_id
        request.sequence_start, request.sequence_end = self.sequence_start, self.sequence_end
        request.priority, request.timeout_us = self.priority, self.timeout_us


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_lease)
_decoder = msgspec.msgpack.Decoder(DecodedRequest, dec_hook=decode_lease)
_sizes_decoder = msgspec.msgpack.Decoder(list[int])


def describe(request: Request, byte_sizes: list[int], response_options: bytes = b"") -> bytes:
    """Return the message about `request`, of whose inputs the bytes are left out. Raises `InvalidArgument`."""
    described = _encoder.encode(
        DecodedRequest(
            [Tensor(each.name, each.datatype, each.shape, None, None, each.client_span) for each in request.inputs],
            byte_sizes,
            request.outputs,
            request.id,
            request.parameters,
            request.correlation_id,
            request.sequence_start,
            request.sequence_end,
            request.priority,
            request.timeout_us,
            response_options,
            request.model_name,
            request.model_version,
        )
    )
    if len(described) > MAX_DESCRIPTION_BYTE_SIZE:
        raise InvalidArgument(
            f"the names, shapes and parameters of the request take {len(described)} bytes, "
            f"expected at most {MAX_DESCRIPTION_BYTE_SIZE}"
        )
    return described


def read_description(message: bytes) -> DecodedRequest:
    """Return what `describe` has encoded."""
    return _decoder.decode(message)


def encode_sizes(byte_sizes: list[int]) -> bytes:
    """Return how many bytes each input has, as the message at the end of the task."""
    return _encoder.encode(byte_sizes)


def read_sizes(message: bytes) -> list[int]:
    """Return what `encode_sizes` has encoded."""
    return _sizes_decoder.decode(message)


def aligned(byte_size: int) -> int:
    """Return `byte_size`, rounded up to where the next tensor begins."""
    return -(-byte_size // ALIGNMENT) * ALIGNMENT


class TensorBytes:
    """The bytes of an input that a helper has still to write: up to `byte_size` of them, by `write`."""

    def __init__(self, byte_size: int, write: Callable[[memoryview], int]) -> None:
        """`write` fills the memory that it gets and returns how many bytes it has written."""
        self.byte_size = byte_size
        self.write = write

    @classmethod
    def of(cls, data: Buffer) -> TensorBytes:
        """Return bytes that are in the message as they are."""

        def write(memory: memoryview) -> int:
            memory[:] = data
            return len(data)

        return cls(len(data), write)


def decode_steps(request: Request, contents: list[TensorBytes | None], response_options: bytes = b"") -> TaskSteps:
    """Describe `request`, and write the bytes of its inputs into the memory: the end of every task that decodes.

    `contents` is parallel to the inputs, None for one in a client's region.
    """
    most = [0 if each is None else each.byte_size for each in contents]
    memory = yield describe(request, most, response_options)
    byte_sizes, position = [], 0
    for content, byte_size in zip(contents, most, strict=True):
        byte_sizes.append(0 if content is None else content.write(memory[position : position + byte_size]))
        position += aligned(byte_size)
    return TaskResult(encode_sizes(byte_sizes))

"""The key of a request in the response cache: what makes two requests equal. Also computed by helpers. Pure.

Two requests have the same key only if all of these are equal (id, priority and timeout may differ): the load
of the model, inputs (names, datatypes, shapes, bytes), requested outputs with their classification, parameters, and
fields of sequences. The key is a BLAKE2b hash of 256 bits, so that nobody can make two requests with the same key.
Triton's key has only the model, the names of inputs and their bytes (core's cache_manager.cc).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from kernel.serving.helper_tasks import TaskResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from kernel.serving.request import WantedInference
    from shm.tensor import Buffer, Tensor

#: The bytes of a key.
KEY_BYTE_SIZE = 32

_encoder = msgspec.msgpack.Encoder()


def inputs_in_order(request: WantedInference) -> list[Tensor]:
    """Return the inputs sorted by name, as in the key: their order in the request has no meaning."""
    return sorted(request.inputs, key=_name)


def describe(request: WantedInference, salt: bytes) -> bytes:
    """Return all parts of `request` in the key, except the bytes of its inputs. `salt` identifies the model's load."""
    inputs = [(each.name, each.datatype, each.shape, each.byte_size) for each in inputs_in_order(request)]
    outputs = [(each.name, each.classification) for each in request.outputs]
    sequence = (request.correlation_id, request.sequence_start, request.sequence_end)
    parameters = sorted(request.parameters.items())
    return _encoder.encode((salt, inputs, outputs, parameters, sequence))


def digest(description: bytes, contents: Iterable[Buffer]) -> bytes:
    """Return the key for what `describe` returned, and the bytes of the inputs in the same order."""
    # The sizes of the description and of each input are hashed too, so that different requests never give equal bytes.
    hasher = hashlib.blake2b(len(description).to_bytes(8), digest_size=KEY_BYTE_SIZE)
    hasher.update(description)
    for content in contents:
        hasher.update(content)
    return hasher.digest()


def _name(tensor: Tensor) -> str:
    return tensor.name


#: The name of the function.
DIGEST = "cache.digest"


def digest_task(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Return the key of a request: `arguments` is its description, `sources` are its inputs."""
    yield from ()  # a task function is a generator, and this one needs no memory
    return TaskResult(digest(arguments, sources))

"""Protobuf messages that no library would write: millions of empty parts, nested groups. Pure."""

from __future__ import annotations

import struct

from protocols.grpc.generated import grpc_service_pb2 as pb

VARINT, FIXED64, DELIMITED, START_GROUP, END_GROUP, FIXED32 = range(6)

#: A number that no message of the protocol has, so that its fields are unknown.
UNKNOWN = 100


def varint(value: int) -> bytes:
    """Return a base-128 number."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


def delimited(number: int, content: bytes) -> bytes:
    """Return a field with a length: a string, bytes, a message, or packed numbers."""
    return tag(number, DELIMITED) + varint(len(content)) + content


def repeated(field: bytes, byte_size: int) -> bytes:
    """Return `field` as often as it fits into `byte_size` bytes."""
    return field * (byte_size // len(field))


def numbered(prefix: bytes, suffix: bytes, byte_size: int) -> bytes:
    """Return entries with different keys in about `byte_size` bytes: `prefix`, seven digits, `suffix`."""
    count = byte_size // (len(prefix) + 7 + len(suffix))
    return b"".join(b"%b%07d%b" % (prefix, number, suffix) for number in range(count))


def map_entries(number: int, value: bytes, byte_size: int, before_key: bytes = b"") -> bytes:
    """Return entries of the map `number` with the encoded message `value` and different keys.

    A key is `before_key` and seven digits.
    """
    length, rest = len(before_key) + 7, delimited(2, value)
    key = b"\x0a" + varint(length) + before_key
    return numbered(tag(number, DELIMITED) + varint(len(key) + 7 + len(rest)) + key, rest, byte_size)


def nested_groups(byte_size: int) -> bytes:
    """Return an unknown group in a group in a group, closed in order."""
    opened, closed = tag(UNKNOWN, START_GROUP), tag(UNKNOWN, END_GROUP)
    depth = byte_size // (len(opened) + len(closed))
    return opened * depth + closed * depth


def infer_message(model: str, *parts: bytes) -> bytes:
    """Return a `ModelInferRequest` for `model` with further encoded fields."""
    return pb.ModelInferRequest(model_name=model).SerializeToString() + b"".join(parts)


def infer_input(datatype: str, shape: list[int], *parts: bytes, name: str = "INPUT0") -> bytes:
    """Return the field `inputs` with one entry: a tensor with further encoded fields."""
    tensor = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    return delimited(5, tensor.SerializeToString() + b"".join(parts))


def contents(field: bytes) -> bytes:
    """Return the field `contents` of a tensor."""
    return delimited(5, field)


def raw_contents(content: bytes) -> bytes:
    """Return one entry of `raw_input_contents`."""
    return delimited(7, content)


#: Fields of `InferTensorContents`.
BOOLS, INTS, FLOATS, BYTES = 1, 2, 6, 8


def packed_ints(byte_size: int) -> tuple[int, bytes]:
    """Return how many numbers are in a packed field of `int_contents` with about `byte_size` bytes, and the field."""
    block = b"".join(varint(value) for value in range(0, 4096, 2))
    times = byte_size // len(block)
    return 2048 * times, delimited(INTS, block * times)


def packed_floats(byte_size: int) -> tuple[int, bytes]:
    """The same for `fp32_contents`."""
    count = byte_size // 4
    return count, delimited(FLOATS, floats(count))


def floats(count: int) -> bytes:
    """Return FP32 numbers that take all digits to write: nothing shorter stands for them."""
    block = struct.pack("<1024f", *((n * 0.7310585786 + 1e-3) * 1.7 ** (n % 40 - 20) for n in range(1024)))
    return (block * (count // 1024 + 1))[: count * 4]

"""The order in which Triton checks the inputs of a request, so that our errors name the same input. Pure.

Triton stores inputs in a `std::unordered_map` by name (infer_request.h). libstdc++ inserts a name before all others if
its bucket is empty, else before the names in its bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: The bucket counts: a map with at most this many names has this many buckets.
_BUCKET_COUNTS = (13, 29, 59, 127, 257, 541, 1109)

#: The largest total length of names that are put in order: hashing takes microseconds per name, for an error text.
_MAX_LENGTH = 1 << 16

#: The seed of `std::hash<std::string>`, and the multiplier of MurmurHash64A.
_SEED = 0xC70F6907
_FACTOR = 0xC6A4A7935BD1E995
_64_BITS = (1 << 64) - 1


def triton_input_order(names: Sequence[str]) -> list[str]:
    """Return `names`, which are distinct and in the order of the request, in Triton's order.

    More than 1109 names, or very long ones, are returned in the given order: no model has such inputs.
    """
    if len(names) > _BUCKET_COUNTS[-1] or sum(map(len, names)) > _MAX_LENGTH:
        return list(names)
    order: list[str] = []
    for count in _BUCKET_COUNTS:
        if len(order) == len(names):
            break
        # When the map is full it gets more buckets, and all names are inserted again.
        order = _inserted([*order, *names[len(order) : count]], count)
    return order


def _inserted(names: Iterable[str], bucket_count: int) -> list[str]:
    buckets: dict[int, list[str]] = {}
    for name in names:
        buckets.setdefault(_hash(name.encode("utf-8", "surrogatepass")) % bucket_count, []).append(name)
    return [name for bucket in reversed(buckets.values()) for name in reversed(bucket)]


def _hash(data: bytes) -> int:
    """Return libstdc++'s variant of MurmurHash64A, which mixes the last 1 to 7 bytes less."""
    whole = len(data) & ~7
    result = _SEED ^ (len(data) * _FACTOR & _64_BITS)
    for start in range(0, whole, 8):
        word = int.from_bytes(data[start : start + 8], "little")
        result = (result ^ _mixed(word * _FACTOR & _64_BITS) * _FACTOR & _64_BITS) * _FACTOR & _64_BITS
    if whole < len(data):
        result = (result ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _64_BITS
    return _mixed(_mixed(result) * _FACTOR & _64_BITS)


def _mixed(value: int) -> int:
    return value ^ (value >> 47)

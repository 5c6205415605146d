"""The order in which Triton goes through the inputs of a request, so that errors name the same one. Pure.

Triton keeps them in a `std::unordered_map` by name (infer_request.h). In that of libstdc++, a name whose bucket is
empty comes before all others, one whose bucket is not comes before those in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: How many buckets there are while there are at most as many names.
_BUCKET_COUNTS = (13, 29, 59, 127, 257, 541, 1109)

#: Longest names, all together, that are put in order: it costs some microseconds a name, for an error's text.
_MAX_LENGTH = 1 << 16

#: The seed of `std::hash<std::string>`, and what MurmurHash64A multiplies with.
_SEED = 0xC70F6907
_FACTOR = 0xC6A4A7935BD1E995
_64_BITS = (1 << 64) - 1


def triton_input_order(names: Sequence[str]) -> list[str]:
    """Return different names, given in the order of the request, in the order in which Triton looks at them.

    What no model has is left as it is: more than a thousand names, or very long ones.
    """
    if len(names) > _BUCKET_COUNTS[-1] or sum(map(len, names)) > _MAX_LENGTH:
        return list(names)
    order: list[str] = []
    for count in _BUCKET_COUNTS:
        if len(order) == len(names):
            break
        # When the buckets are full there are more of them, and all names are put in again.
        order = _put_in([*order, *names[len(order) : count]], count)
    return order


def _put_in(names: Iterable[str], bucket_count: int) -> list[str]:
    buckets: dict[int, list[str]] = {}
    for name in names:
        buckets.setdefault(_hash(name.encode("utf-8", "surrogatepass")) % bucket_count, []).append(name)
    return [name for bucket in reversed(buckets.values()) for name in reversed(bucket)]


def _hash(data: bytes) -> int:
    """Return MurmurHash64A of `data` as libstdc++ has it, which mixes the bytes of the rest less."""
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

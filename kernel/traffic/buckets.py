"""Which share of the requests goes to which target: buckets, a hash for keys, and bounds for weights. Pure.

There are 10,000 buckets. A key has the bucket `crc32(key, crc32(model + NUL + salt + NUL)) mod 10000`, both texts in
UTF-8: the same in each server and after each restart. Other targets than the first own the lowest buckets, in their
order, and the first one the rest. So a target whose weight grows takes keys from the first target, and gives it none.
"""

from __future__ import annotations

from zlib import crc32

#: The resolution of shares.
BUCKETS = 10_000


def seed_of(model: str, salt: str) -> int:
    """Return where the hash of a key begins."""
    return crc32(f"{model}\0{salt}\0".encode())


def bucket_of(key: str, seed: int) -> int:
    """Return the bucket of a key."""
    return crc32(key.encode("utf-8", "surrogatepass"), seed) % BUCKETS


def bounds(weights: list[int]) -> list[int]:
    """Return for each target the bucket behind its last one; the first target has the highest buckets.

    A target with a weight owns a bucket at least, as long as there is one for it. The sum must be greater than 0.
    """
    total, begin = sum(weights), 0
    found = [BUCKETS]
    counted = 0
    for weight in weights[1:]:
        counted += weight
        end = max(begin, counted * BUCKETS // total)
        if weight and end == begin and end < BUCKETS:
            end += 1
        found.append(end)
        begin = end
    return found

from __future__ import annotations

from collections import Counter
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from kernel.traffic.buckets import BUCKETS, bounds, bucket_of, seed_of


def test_the_hash_is_the_one_that_the_documents_state() -> None:
    assert bucket_of("user-7", seed_of("resnet", "")) == crc32(b"user-7", crc32(b"resnet\0\0")) % 10_000
    assert bucket_of("user-7", seed_of("resnet", "")) == 23, "a new number would move every key of every server"


def test_keys_fill_the_buckets_evenly() -> None:
    counts = Counter(bucket_of(f"user-{number}", seed_of("m", "")) // 100 for number in range(100_000))
    chi_square = sum((counts[place] - 1000) ** 2 / 1000 for place in range(100))
    assert chi_square < 149, "99 degrees of freedom: chance exceeds it once in 1,000 times"


def test_another_salt_chooses_other_keys() -> None:
    keys = [f"{number:08}" for number in range(100_000)]
    first = {key for key in keys if bucket_of(key, seed_of("m", "a")) < 1000}
    second = {key for key in keys if bucket_of(key, seed_of("m", "b")) < 1000}
    assert 9_000 < len(first) < 11_000
    assert 700 < len(first & second) < 1300, "a tenth of a tenth: the choices are independent"


def test_the_first_target_has_the_highest_buckets() -> None:
    assert bounds([95, 5]) == [BUCKETS, 500]
    assert bounds([80, 15, 5]) == [BUCKETS, 1500, 2000]
    assert bounds([1]) == [BUCKETS]


def test_a_small_weight_has_a_bucket() -> None:
    assert bounds([1_000_000, 1, 1]) == [BUCKETS, 1, 2]


@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 1000))
def test_a_target_that_grows_gives_no_bucket_away(stable: int, weight: int, more: int) -> None:
    assert bounds([stable, weight + more])[1] >= bounds([stable, weight])[1]


@given(st.lists(st.integers(0, 1_000_000), min_size=1, max_size=16).filter(any))
def test_the_bounds_ascend_and_a_weight_of_0_owns_nothing(weights: list[int]) -> None:
    found = bounds(weights)
    begin = 0
    for weight, end in zip(weights[1:], found[1:], strict=True):
        assert begin <= end <= BUCKETS
        assert weight or end == begin
        assert abs((end - begin) - weight * BUCKETS / sum(weights)) <= 16
        begin = end

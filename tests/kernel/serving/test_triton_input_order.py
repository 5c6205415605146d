"""Inputs are named in the order of libstdc++'s hash table. What is expected was printed by a C++ program."""

from __future__ import annotations

import ctypes
import ctypes.util

import pytest

from kernel.serving import triton_input_order as module
from kernel.serving.triton_input_order import triton_input_order


def test_a_few_inputs_are_looked_at_from_the_last_to_the_first() -> None:
    assert triton_input_order([]) == []
    assert triton_input_order(["IN", "FREE", "EXTRA", "MORE"]) == ["MORE", "EXTRA", "FREE", "IN"]


@pytest.mark.parametrize(
    ("names", "order"),
    [
        ("input_ids attention_mask token_type_ids", "token_type_ids attention_mask input_ids"),
        (
            "IN_0 IN_1 IN_2 IN_3 IN_4 IN_5 IN_6 IN_7 IN_8 IN_9 IN_10 IN_11 IN_12 IN_13",
            "IN_0 IN_10 IN_2 IN_6 IN_4 IN_3 IN_11 IN_13 IN_5 IN_1 IN_7 IN_12 IN_8 IN_9",
        ),
        ("A B C D", "B D C A"),
    ],
    ids=["apart from each other", "more than the first buckets hold", "in the same bucket"],
)
def test_the_order_is_that_of_a_hash_table(names: str, order: str) -> None:
    assert triton_input_order(names.split()) == order.split()


@pytest.mark.parametrize("name", ["", "a", "INPUT0", "12345678", "input_ids:0", "ünïcode", "a" * 100])
def test_the_hash_is_that_of_libstdcxx(name: str) -> None:
    path = ctypes.util.find_library("stdc++")
    if path is None:
        pytest.skip("there is no libstdc++ here")
    of_bytes = ctypes.CDLL(path)["_ZSt11_Hash_bytesPKvmm"]
    of_bytes.restype = ctypes.c_size_t
    of_bytes.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    data = name.encode()
    assert module._hash(data) == of_bytes(data, len(data), module._SEED)


def test_what_would_take_long_is_left_as_it_is() -> None:
    many = [str(number) for number in range(2000)]
    assert triton_input_order(many) == many
    assert triton_input_order(["b" * 100_000, "a"]) == ["b" * 100_000, "a"]

"""Requests against a configuration. Texts are Triton's.

Inputs are named in the order of libstdc++'s hash table. What is expected was printed by a C++ program.
"""

from __future__ import annotations

import ctypes
import ctypes.util

import pytest

from kernel.errors import InvalidArgument
from kernel.serving import validation as module
from kernel.serving.request import Request
from kernel.serving.validation import triton_input_order, validate
from kernel.testing import RecordingSink, model_spec
from shm.tensor import RequestedOutput, Tensor

SPEC = model_spec("m", max_batch_size=8, dims=(16,))

NOTE = "NOTE: Setting a non-zero max_batch_size"


def request(*tensors: Tensor, outputs: list[str] | None = None, id: str = "") -> Request:
    wanted = [RequestedOutput(name) for name in outputs or []]
    return Request("m", list(tensors), RecordingSink(), id=id, outputs=wanted)


def tensor(name: str = "IN", datatype: str = "FP32", shape: tuple[int, ...] = (2, 16), byte_size: int = 128) -> Tensor:
    return Tensor(name, datatype, list(shape), bytes(byte_size))


def test_a_good_request_gets_its_batch_size() -> None:
    good = request(tensor(), outputs=["OUT"])
    validate(good, SPEC)
    assert good.batch_size == 2


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (request(tensor(), outputs=["X"]), "unexpected inference output 'X' for model 'm'"),
        (
            request(tensor(), outputs=["OUT", "OUT"]),
            "[request id: <id_unknown>] output 'OUT' already exists in request",
        ),
        (
            request(tensor(shape=(1, -1))),
            "[request id: <id_unknown>] All input dimensions should be specified for input 'IN' for model 'm', "
            "got [1,-1]",
        ),
        (request(tensor(), tensor()), "[request id: <id_unknown>] input 'IN' already exists in request"),
        (
            request(id="7"),
            "[request id: 7] expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required "
            "input(s) ['IN']. Please provide all required input(s).",
        ),
        (
            request(tensor(), tensor("X")),
            "[request id: <id_unknown>] expected 1 inputs but got 2 inputs for model 'm'. Got input(s) ['X','IN'], but "
            "missing required input(s) ]. Please provide all required input(s).",
        ),
        (request(tensor("X")), "unexpected inference input 'X' for model 'm'"),
        (
            request(tensor(shape=())),
            "[request id: <id_unknown>] input 'IN' has no shape but model requires batch dimension for 'm'",
        ),
        (
            request(tensor(shape=(9, 16))),
            "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'm'",
        ),
        (
            request(tensor(datatype="INT32")),
            "[request id: <id_unknown>] inference input 'IN' data-type is 'INT32', but model 'm' expects 'FP32'",
        ),
        (
            request(tensor(byte_size=127)),
            "[request id: <id_unknown>] input byte size mismatch for input 'IN' for model 'm'. Expected 128, got 127",
        ),
    ],
)
def test_a_bad_request_is_refused_with_tritons_text(bad: Request, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate(bad, SPEC)
    assert caught.value.message == text
    assert caught.value.before_queueing


def test_a_wrong_shape_names_both_and_explains_the_batch_dimension() -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate(request(tensor(shape=(1, 15))), SPEC)
    start = "[request id: <id_unknown>] unexpected shape for input 'IN' for model 'm'. Expected [-1,16], got [1,15]. "
    assert caught.value.message.startswith(start + NOTE)
    with pytest.raises(InvalidArgument) as caught:
        validate(request(tensor(shape=(15,))), model_spec("m", dims=(16,)))
    assert caught.value.message.endswith("Expected [16], got [15]. ")


def test_dimensions_that_are_too_large_to_multiply_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        validate(request(tensor(shape=(2**33, 2**33), byte_size=0)), model_spec("m", dims=(-1, -1)))


def test_an_empty_batch_is_accepted() -> None:
    empty = request(tensor(shape=(0, 16), byte_size=0))
    validate(empty, SPEC)
    assert empty.batch_size == 0


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

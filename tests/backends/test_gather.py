from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.gather import batch_sizes, gather
from backends.reshape import TensorShapes
from backends.scatter import scatter
from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.arrays import Array
    from tests.backends.conftest import Lab

DATATYPES = ["BOOL", "UINT8", "INT16", "INT64", "FP16", "FP32", "FP64", "BYTES", "BF16"]


def floats(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_the_inputs_of_a_single_request_are_used_in_place(lab: Lab) -> None:
    request = lab.request({"A": floats(2, 3)})
    array = gather([request], {})["A"]
    assert np.shares_memory(array, np.frombuffer(request.inputs[0].raw(), np.uint8))


def test_rows_of_several_requests_are_joined_in_one_contiguous_array(lab: Lab) -> None:
    requests = [lab.request({"A": floats(1, 2)}), lab.request({"A": floats(2, 2) + 10})]
    array = gather(requests, {"A": TensorShapes("A", "FP32", (2,), batched=True)})["A"]
    assert array.flags.c_contiguous
    assert array.tolist() == [[0, 1], [10, 11], [12, 13]]


def test_requests_may_list_their_inputs_in_any_order(lab: Lab) -> None:
    one, two = floats(1, 1), floats(1, 1) + 1
    arrays = gather([lab.request({"A": one, "B": two}), lab.request({"B": two, "A": one})], {})
    assert arrays["A"].tolist() == [[0], [0]]
    assert arrays["B"].tolist() == [[1], [1]]


def test_an_optional_input_that_no_request_has_is_omitted(lab: Lab) -> None:
    specs = {"A": TensorShapes("A", "FP32", (1,)), "B": TensorShapes("B", "FP32", (1,), optional=True)}
    assert list(gather([lab.request({"A": floats(1)})], specs)) == ["A"]


def test_arrays_have_the_model_s_shape(lab: Lab) -> None:
    specs = {"A": TensorShapes("A", "FP32", (6,), (2, 3), batched=True)}
    requests = [lab.request({"A": floats(1, 6)}), lab.request({"A": floats(2, 6)})]
    assert gather(requests, specs)["A"].shape == (3, 2, 3)
    assert gather(requests[:1], specs)["A"].shape == (1, 2, 3)


def test_ragged_inputs_become_one_dimension(lab: Lab) -> None:
    specs = {"A": TensorShapes("A", "FP32", (-1,), batched=True, ragged=True)}
    requests = [lab.request({"A": floats(1, 2)}), lab.request({"A": floats(1, 3)})]
    assert gather(requests, specs)["A"].tolist() == [0, 1, 0, 1, 2]


def test_requests_with_different_inputs_are_refused(lab: Lab) -> None:
    with pytest.raises(InternalError, match="must have the same inputs"):
        gather([lab.request({"A": floats(1, 1)}), lab.request({"A": floats(1, 1), "B": floats(1, 1)})], {})
    with pytest.raises(InternalError, match="input 'A' is missing"):
        gather([lab.request({"A": floats(1, 1)}), lab.request({"B": floats(1, 1)})], {})
    with pytest.raises(InternalError, match="input 'A' has different shapes"):
        gather([lab.request({"A": floats(1, 1)}), lab.request({"A": floats(1, 2)})], {})


def test_batch_sizes_are_rows_and_limited(lab: Lab) -> None:
    requests = [lab.request({"A": floats(1, 1)}), lab.request({"A": floats(3, 1)})]
    assert batch_sizes(requests, 4) == [1, 3]
    assert batch_sizes(requests[1:], 0) == [1]
    with pytest.raises(InternalError, match="batch size 4, max allowed is 3"):
        batch_sizes(requests, 3)


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, list[Array]]:
    datatype = draw(st.sampled_from(DATATYPES))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    arrays: list[Array] = []
    for size in sizes:
        raw = seed.integers(0, 2, (size, 6))
        if datatype == "BYTES":
            strings = np.array([b"%d" % n for n in seed.integers(0, 999, size * 6)] + [None], object)[:-1]
            arrays.append(strings.reshape(size, 6))
        else:
            names = {"BOOL": "?", "BF16": "u2", "FP16": "f2", "FP32": "f4", "FP64": "f8"}
            arrays.append(raw.astype(names.get(datatype, datatype.lower())))
    return datatype, arrays


@given(batch=batches(), reshaped=st.booleans())
def test_batched_and_single_requests_have_the_same_responses(
    new_lab: Callable[[], Lab], batch: tuple[str, list[Array]], reshaped: bool
) -> None:
    datatype, given_arrays = batch
    lab = new_lab()
    spec = TensorShapes("T", datatype, (6,), (2, 3) if reshaped else None, batched=True)
    bf16 = ["T"] if datatype == "BF16" else []

    together = [lab.request({"T": array}, bf16=bf16) for array in given_arrays]
    scatter(together, batch_sizes(together, 99), gather(together, {"T": spec}), {"T": spec})
    for request, array in zip(together, given_arrays, strict=True):
        alone = lab.request({"T": array}, bf16=bf16)
        scatter([alone], batch_sizes([alone], 99), gather([alone], {"T": spec}), {"T": spec})
        assert np.array_equal(lab.outputs(request)["T"], lab.outputs(alone)["T"])
        assert np.array_equal(lab.outputs(request)["T"], array)
        assert lab.datatypes(request) == lab.datatypes(alone) == {"T": datatype}

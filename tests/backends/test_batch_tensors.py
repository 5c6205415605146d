from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.batch_tensors import (
    BatchInput,
    batch_input_arrays,
    batch_inputs_of,
    batch_sizes,
    gather,
    requested_outputs,
    scatter,
)
from backends.reshape import TensorShapes
from kernel.errors import BadConfig, InternalError, Unsupported

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


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [2, 6]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [2, 8]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 2, 8]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0, 0, 0, 0, 0, 0]),
        ("BATCH_ITEM_SHAPE", [[2], [3], [3]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [2, 3, 3]),
    ],
)
def test_each_kind_describes_the_parts_of_the_batch(lab: Lab, kind: str, expected: list[object]) -> None:
    requests = [lab.request({"A": np.zeros(shape, np.float32)}) for shape in ((1, 2), (2, 3))]
    batch_inputs = [BatchInput(kind, ("I", "J"), "FP32", "A")]
    arrays = batch_input_arrays(batch_inputs, requests)
    assert list(arrays) == ["I", "J"]
    assert arrays["I"].dtype == np.float32
    assert arrays["I"].tolist() == expected


def test_batch_inputs_are_read_from_a_configuration() -> None:
    entry = {"target_name": ["I"], "data_type": "TYPE_INT32", "source_input": ["A"]}
    assert batch_inputs_of({"batch_input": [entry]}) == [BatchInput("BATCH_ELEMENT_COUNT", ("I",), "INT32", "A")]
    with pytest.raises(BadConfig, match="unknown kind 'NONE' of batch input"):
        batch_inputs_of({"batch_input": [{**entry, "kind": "NONE"}]})


BATCHED = {name: TensorShapes(name, "FP32", (2,), batched=True) for name in ("X", "Y")}


def test_each_request_gets_its_own_rows(lab: Lab) -> None:
    one, two = lab.request({}), lab.request({})
    scatter([one, two], [1, 2], {"X": floats(3, 2)}, BATCHED)
    assert lab.outputs(one)["X"].tolist() == [[0, 1]]
    assert lab.outputs(two)["X"].tolist() == [[2, 3], [4, 5]]


def test_each_request_gets_the_outputs_that_it_requested(lab: Lab) -> None:
    one, two = lab.request({}, outputs=["Y"]), lab.request({})
    scatter([one, two], [1, 1], {"X": floats(2, 2), "Y": floats(2, 2)}, BATCHED)
    assert list(lab.outputs(one)) == ["Y"]
    assert list(lab.outputs(two)) == ["X", "Y"]


def test_an_output_is_computed_if_one_request_asks_for_it(lab: Lab) -> None:
    assert requested_outputs([lab.request({}, outputs=["Y"])], BATCHED) == ["Y"]
    assert requested_outputs([lab.request({}, outputs=["Y"]), lab.request({})], BATCHED) == ["X", "Y"]


def test_without_batching_the_request_gets_the_whole_output(lab: Lab) -> None:
    request = lab.request({})
    scatter([request], [1], {"X": floats(5, 2)}, {"X": TensorShapes("X", "FP32", (-1, 2))})
    assert lab.outputs(request)["X"].shape == (5, 2)


def test_outputs_have_the_client_s_shape(lab: Lab) -> None:
    request = lab.request({})
    spec = TensorShapes("X", "FP32", (6,), (2, 3), batched=True)
    scatter([request], [2], {"X": floats(2, 2, 3)}, {"X": spec})
    assert lab.outputs(request)["X"].shape == (2, 6)


def test_an_output_with_too_few_rows_fails_only_the_requests_that_miss_rows(lab: Lab) -> None:
    one, two = lab.request({}), lab.request({})
    two.ref.id = "7"
    scatter([one, two], [1, 2], {"X": floats(2, 2)}, BATCHED)
    assert lab.outputs(one)["X"].tolist() == [[0, 1]]
    assert isinstance(lab.error(two), Unsupported)
    assert lab.error(two).message == (
        "[request id: 7] failed to split the output tensor 'X' in responses: "
        "expected batch size of atleast 3 in model output, got 2"
    )


def test_a_scalar_output_fails_a_batching_model(lab: Lab) -> None:
    request = lab.request({})
    scatter([request], [1], {"X": np.array(1, np.float32)}, BATCHED)
    assert "expected batch size of atleast 1 in model output, got 0" in lab.error(request).message


def test_a_shape_that_contradicts_the_configuration_fails_the_request(lab: Lab) -> None:
    request = lab.request({})
    spec = TensorShapes("X", "FP32", (6,), (2, 3), batched=True)
    scatter([request], [1], {"X": floats(1, 5)}, {"X": spec})
    assert isinstance(lab.error(request), InternalError)


def test_a_flat_output_is_divided_by_the_shapes_of_its_source_input(lab: Lab) -> None:
    one, two = lab.request({"A": floats(1, 2)}, outputs=["Z"]), lab.request({"A": floats(1, 3)})
    spec = TensorShapes("X", "FP32", (-1,), batched=True, shaped_like="A")
    scatter([one, two], [1, 1], {"X": floats(5)}, {"X": spec})
    assert lab.outputs(one) == {}
    assert lab.outputs(two)["X"].tolist() == [[2, 3, 4]]

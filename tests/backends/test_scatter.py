from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.reshape import TensorShapes
from backends.scatter import requested_outputs, scatter
from kernel.errors import InternalError, Unsupported

if TYPE_CHECKING:
    from shm.arrays import Array
    from tests.backends.conftest import Lab

BATCHED = {name: TensorShapes(name, "FP32", (2,), batched=True) for name in ("X", "Y")}


def floats(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


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

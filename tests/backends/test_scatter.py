from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.reshape import TensorShapes
from backends.scatter import scatter, wanted_outputs
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
    assert lab.answer(one)["X"].tolist() == [[0, 1]]
    assert lab.answer(two)["X"].tolist() == [[2, 3], [4, 5]]


def test_each_request_gets_the_outputs_that_it_asked_for(lab: Lab) -> None:
    one, two = lab.request({}, outputs=["Y"]), lab.request({})
    scatter([one, two], [1, 1], {"X": floats(2, 2), "Y": floats(2, 2)}, BATCHED)
    assert list(lab.answer(one)) == ["Y"]
    assert list(lab.answer(two)) == ["X", "Y"]


def test_outputs_are_wanted_if_one_request_asked_for_them(lab: Lab) -> None:
    assert wanted_outputs([lab.request({}, outputs=["Y"])], BATCHED) == ["Y"]
    assert wanted_outputs([lab.request({}, outputs=["Y"]), lab.request({})], BATCHED) == ["X", "Y"]


def test_a_model_without_batches_answers_with_its_whole_output(lab: Lab) -> None:
    request = lab.request({})
    scatter([request], [1], {"X": floats(5, 2)}, {"X": TensorShapes("X", "FP32", (-1, 2))})
    assert lab.answer(request)["X"].shape == (5, 2)


def test_clients_see_the_shape_of_the_configuration(lab: Lab) -> None:
    request = lab.request({})
    spec = TensorShapes("X", "FP32", (6,), (2, 3), batched=True)
    scatter([request], [2], {"X": floats(2, 2, 3)}, {"X": spec})
    assert lab.answer(request)["X"].shape == (2, 6)


def test_a_model_with_too_few_rows_fails_those_who_miss_theirs(lab: Lab) -> None:
    one, two = lab.request({}), lab.request({})
    two.ref.id = "7"
    scatter([one, two], [1, 2], {"X": floats(2, 2)}, BATCHED)
    assert lab.answer(one)["X"].tolist() == [[0, 1]]
    assert isinstance(lab.error(two), Unsupported)
    assert lab.error(two).message == (
        "[request id: 7] failed to split the output tensor 'X' in responses: "
        "expected batch size of atleast 3 in model output, got 2"
    )


def test_a_scalar_has_no_rows(lab: Lab) -> None:
    request = lab.request({})
    scatter([request], [1], {"X": np.array(1, np.float32)}, BATCHED)
    assert "expected batch size of atleast 1 in model output, got 0" in lab.error(request).message


def test_a_shape_that_does_not_fit_the_configuration_fails_the_request(lab: Lab) -> None:
    request = lab.request({})
    spec = TensorShapes("X", "FP32", (6,), (2, 3), batched=True)
    scatter([request], [1], {"X": floats(1, 5)}, {"X": spec})
    assert isinstance(lab.error(request), InternalError)


def test_a_flat_output_is_divided_by_the_shapes_of_an_input(lab: Lab) -> None:
    one, two = lab.request({"A": floats(1, 2)}, outputs=["Z"]), lab.request({"A": floats(1, 3)})
    spec = TensorShapes("X", "FP32", (-1,), batched=True, shaped_like="A")
    scatter([one, two], [1, 1], {"X": floats(5)}, {"X": spec})
    assert lab.answer(one) == {}
    assert lab.answer(two)["X"].tolist() == [[2, 3, 4]]

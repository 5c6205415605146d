"""Small batches have the same responses on the fast path, and unusual requests take the general path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from onnx import TensorProto

from backends.onnxruntime.binding import BoundSession
from backends.onnxruntime.session import open_session
from backends.onnxruntime.signature import OnnxSignature, OnnxTensor, signature_of
from backends.onnxruntime.small_batches import SmallBatches, can_be_small
from backends.reshape import TensorShapes, tensor_specs
from kernel.errors import InternalError, InvalidArgument
from shm.arena import INLINE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.worker.request import WorkerRequest
    from shm.arrays import Array
    from tests.backends.conftest import Lab
    from tests.backends.onnxruntime.conftest import OnnxModels

FLOAT = TensorProto.FLOAT
MAX_ROWS = 4


def floats(*shape: int) -> Array:
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def write_add_sub(models: OnnxModels, *dims: int | str) -> None:
    values = {name: (name, FLOAT, list(dims)) for name in "ABXY"}
    models.write(
        [("Add", ["A", "B"], ["X"]), ("Sub", ["A", "B"], ["Y"])],
        [values["A"], values["B"]],
        [values["X"], values["Y"]],
    )


def small_batches(models: OnnxModels) -> SmallBatches:
    config = models.completed()
    inputs, outputs = tensor_specs(config, "input"), tensor_specs(config, "output")
    arguments = models.arguments(config)
    session = open_session(arguments)
    signature = signature_of(session, models.file)
    assert all(can_be_small(spec, signature) for spec in (*inputs.values(), *outputs.values()))
    bound = BoundSession(session, None, signature)
    assert bound.on_cpu
    return SmallBatches(bound, inputs.values(), outputs.values(), arguments.max_batch_size)


# ---- responses ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1], [3], [1, 2], [2, 1, 1], [MAX_ROWS]])
@pytest.mark.parametrize("names", ["AB", "BA"])
@pytest.mark.parametrize("outputs", [[], ["X", "Y"], ["Y", "X"]])
def test_each_request_gets_its_own_rows(
    lab: Lab, models: OnnxModels, sizes: list[int], names: str, outputs: list[str]
) -> None:
    write_add_sub(models, "N", 4)
    small = small_batches(models)
    given = {"A": floats(sum(sizes), 4), "B": 100 * floats(sum(sizes), 4)}
    for _ in range(2):  # first with a new binding, then with the existing one
        requests = []
        for size, end in zip(sizes, np.cumsum(sizes), strict=True):
            requests.append(lab.request({name: given[name][end - size : end] for name in names}, outputs=outputs))
        assert small.execute(requests, lab.timings)
        for request, size, end in zip(requests, sizes, np.cumsum(sizes), strict=True):
            found = lab.outputs(request)
            assert np.array_equal(found["X"], (given["A"] + given["B"])[end - size : end])
            assert np.array_equal(found["Y"], (given["A"] - given["B"])[end - size : end])
            assert lab.datatypes(request) == {"X": "FP32", "Y": "FP32"}
        given = {name: array + 7 for name, array in given.items()}
    assert lab.timings.start_ns < lab.timings.inputs_ready_ns < lab.timings.inferred_ns


@pytest.mark.parametrize("volatile", [True, False])
def test_a_model_without_batching_takes_the_fast_path(lab: Lab, models: OnnxModels, volatile: bool) -> None:
    write_add_sub(models, 2, 3)
    small = small_batches(models)
    for factor in (1, 2):
        request = lab.request({"A": factor * floats(2, 3), "B": floats(2, 3)}, volatile=volatile)
        assert small.execute([request], lab.timings)
        assert np.array_equal(lab.outputs(request)["X"], (factor + 1) * floats(2, 3))
        assert np.array_equal(lab.outputs(request)["Y"], (factor - 1) * floats(2, 3))


def test_small_batches_take_the_fast_path_and_others_write_to_their_destinations(lab: Lab, models: OnnxModels) -> None:
    lab.reserves = True
    write_add_sub(models, "N", 4)
    backend = models.loaded()
    whole = lab.request({"A": floats(1, 4), "B": floats(1, 4)})
    part = lab.request({"A": floats(1, 4), "B": floats(1, 4)}, outputs=["X"])
    backend.execute([whole], lab.timings)
    assert lab.in_place == []
    backend.execute([part], lab.timings)
    assert lab.in_place == ["X"]
    assert np.array_equal(lab.outputs(whole)["X"], lab.outputs(part)["X"])


# ---- requests for the general path ----------------------------------------------------------


def without_an_input(request: WorkerRequest) -> None:
    request.inputs.pop()


def with_an_input_twice(request: WorkerRequest) -> None:
    request.inputs[1] = request.inputs[0]


def with_an_unknown_input(request: WorkerRequest) -> None:
    request.inputs[1].name = "C"


def with_one_more_input(request: WorkerRequest) -> None:
    request.inputs.append(request.inputs[0])


def with_another_datatype(request: WorkerRequest) -> None:
    request.inputs[1].datatype = "INT32"


def with_another_shape(request: WorkerRequest) -> None:
    request.inputs[1].shape = [2, 2]


def with_another_rank(request: WorkerRequest) -> None:
    request.inputs[1].shape = [4]


def with_too_few_bytes(request: WorkerRequest) -> None:
    request.inputs[1].data = request.inputs[1].raw()[:12]


def with_another_size(request: WorkerRequest) -> None:
    request.inputs[0].shape = [2, 4]


def with_no_rows(request: WorkerRequest) -> None:
    for view in request.inputs:
        view.shape, view.data = [0, 4], view.raw()[:0]


@pytest.mark.parametrize(
    "change",
    [
        without_an_input,
        with_an_input_twice,
        with_an_unknown_input,
        with_one_more_input,
        with_another_datatype,
        with_another_shape,
        with_another_rank,
        with_too_few_bytes,
        with_another_size,
        with_no_rows,
    ],
)
def test_an_unusual_request_gets_no_response_on_the_fast_path(
    lab: Lab, models: OnnxModels, change: Callable[[WorkerRequest], None]
) -> None:
    write_add_sub(models, "N", 4)
    small = small_batches(models)
    usual, unusual = (lab.request({"A": floats(1, 4), "B": floats(1, 4)}) for _ in range(2))
    change(unusual)
    for requests in ([unusual], [usual, unusual]):
        assert not small.execute(requests, lab.timings)
        assert not small.failed
        assert not any(request.finished for request in requests)
    assert small.execute([usual], lab.timings)
    assert lab.outputs(usual)["X"].tolist() == [[2, 4, 6, 8]]


@pytest.mark.parametrize("outputs", [["X"], ["X", "X"], ["Y"]])
def test_a_request_for_some_outputs_does_not_take_the_fast_path(
    lab: Lab, models: OnnxModels, outputs: list[str]
) -> None:
    write_add_sub(models, "N", 4)
    request = lab.request({"A": floats(1, 4), "B": floats(1, 4)}, outputs=outputs)
    assert not small_batches(models).execute([request], lab.timings)


def test_too_many_rows_are_refused_as_on_the_general_path(lab: Lab, models: OnnxModels) -> None:
    write_add_sub(models, "N", 4)
    request = lab.request({"A": floats(MAX_ROWS + 1, 4), "B": floats(MAX_ROWS + 1, 4)})
    assert not small_batches(models).execute([request], lab.timings)
    with pytest.raises(InternalError, match="batch size 5, max allowed is 4"):
        models.loaded().execute([request], lab.timings)


def test_a_batch_that_is_large_in_total_does_not_take_the_fast_path(lab: Lab, models: OnnxModels) -> None:
    width = INLINE_LIMIT // 8
    write_add_sub(models, "N", width)
    small = small_batches(models)
    requests = [lab.request({"A": floats(size, width), "B": floats(size, width)}) for size in (2, 3)]
    assert small.execute(requests[:1], lab.timings)
    assert not small.execute(requests[1:], lab.timings)


def test_wrong_inputs_have_the_errors_of_the_general_path(lab: Lab, models: OnnxModels) -> None:
    write_add_sub(models, "N", 4)
    backend = models.loaded()
    short, lacking = (lab.request({"A": floats(1, 4), "B": floats(1, 4)}) for _ in range(2))
    with_too_few_bytes(short)
    without_an_input(lacking)
    with pytest.raises(InvalidArgument, match="input 'B' does not hold a tensor of shape"):
        backend.execute([short], lab.timings)
    with pytest.raises(InternalError, match=r"Required inputs \(\['B'\]\) are missing"):
        backend.execute([lacking], lab.timings)


def test_the_fast_path_is_still_used_after_wrong_inputs(lab: Lab, models: OnnxModels) -> None:
    models.write(
        [("Gather", ["T", "A"], ["X"])],
        [("A", TensorProto.INT64, ["N", 1])],
        [("X", FLOAT, ["N", 1])],
        {"T": floats(3)},
    )
    small = small_batches(models)
    bad, good = (lab.request({"A": np.array([[index]], np.int64)}) for index in (7, 2))
    assert not small.execute([bad], lab.timings)
    assert small.failed
    assert small.execute([good], lab.timings)
    assert not small.failed
    assert lab.outputs(good)["X"].tolist() == [[3]]


def test_a_model_with_wrong_declared_output_shapes_leaves_the_fast_path(lab: Lab, models: OnnxModels) -> None:
    twice = {"R": np.array([2, 1], np.int64)}
    models.write([("Tile", ["A", "R"], ["X"])], [("A", FLOAT, ["N", 2])], [("X", FLOAT, ["N", 2])], twice)
    backend = models.loaded()
    marks = []
    for _ in range(2):
        request = lab.request({"A": floats(1, 2)})
        backend.execute([request], lab.timings)
        assert lab.outputs(request)["X"].tolist() == [[1, 2]]
        marks.append(lab.timings.inferred_ns)
    assert marks == [3, 5]  # the first request has one more clock call: it tried the fast path before


# ---- tensors of small batches ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "declared", "small"),
    [
        (TensorShapes("T", "FP32", (4,)), (4,), True),
        (TensorShapes("T", "BF16", (4,), batched=True), (-1, 4), True),
        (TensorShapes("T", "UINT8", (INLINE_LIMIT,)), (-1,), True),
        (TensorShapes("T", "UINT8", (INLINE_LIMIT + 1,)), (-1,), False),
        (TensorShapes("T", "FP32", (-1,)), (-1,), False),
        (TensorShapes("T", "FP32", (0,)), (-1,), False),
        (TensorShapes("T", "FP32", (4,), (2, 2)), (2, 2), False),
        (TensorShapes("T", "FP32", (1,)), (), False),
        (TensorShapes("T", "BYTES", (1,)), (1,), False),
        (TensorShapes("T", "FP32", (4,), batched=True, ragged=True), (-1,), False),
        (TensorShapes("T", "FP32", (4,), batched=True, shaped_like="S"), (-1,), False),
        (TensorShapes("U", "FP32", (4,)), (4,), False),
    ],
)
def test_small_tensors_have_a_fixed_shape(spec: TensorShapes, declared: tuple[int, ...], small: bool) -> None:
    tensor = OnnxTensor("T", spec.datatype, declared)
    assert can_be_small(spec, OnnxSignature({"T": tensor}, {})) is small
    assert can_be_small(spec, OnnxSignature({}, {"T": tensor})) is small

"""Configurations that the repeat and square backends refuse, with Triton's texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.builtin.decoupled import ExpectedTensor, RepeatBackend, SquareBackend, check_tensors, dims_of
from kernel.errors import ErrorCode, InvalidArgument, ServingError

if TYPE_CHECKING:
    from backends.worker.request import WorkerRequest
    from tests.backends.conftest import Lab


def repeat_tensor(name: str, data_type: str, dim: int) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": [str(dim)]}


def config(in_dim: int = -1, delay_dim: int = -1, **more: Any) -> dict[str, Any]:
    return {
        "name": "repeat_int32",
        "input": [
            repeat_tensor("IN", "INT32", in_dim),
            repeat_tensor("DELAY", "UINT32", delay_dim),
            repeat_tensor("WAIT", "UINT32", 1),
        ],
        "output": [repeat_tensor("OUT", "INT32", 1), repeat_tensor("IDX", "UINT32", 1)],
        **more,
    }


def loaded_repeat(lab: Lab, configured: dict[str, Any]) -> RepeatBackend:
    backend = RepeatBackend(lab)
    backend.load(ModelArguments(configured, Path("repository/repeat_int32"), 1))
    return backend


def request_of(lab: Lab, values: list[int], delays: list[int]) -> WorkerRequest:
    arrays = {"IN": np.array(values, np.int32), "DELAY": np.array(delays, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    return lab.request(arrays)


def test_each_element_is_a_response_with_its_index(lab: Lab) -> None:
    backend = loaded_repeat(lab, config())
    responses = list(backend.responses(request_of(lab, [5, -7, 5], [0, 1, 0])))
    shown = [[(o.name, o.datatype, o.array.dtype, o.array.tolist()) for o in outputs] for outputs in responses]
    assert shown == [
        [("OUT", "INT32", np.int32, [value]), ("IDX", "UINT32", np.uint32, [index])]
        for index, value in enumerate([5, -7, 5])
    ]


def test_finalize_waits_for_the_last_responses(lab: Lab) -> None:
    backend = loaded_repeat(lab, config())
    requests = [request_of(lab, [1, 2, 3], [0, 0, 0]), request_of(lab, [], [])]
    for request in requests:
        backend.execute([request], lab.timings)
    backend.finalize()
    assert lab.outputs(requests[0])["OUT"].tolist() == [3]
    assert requests[1].finished


def test_the_instance_does_not_wait_for_a_cancelled_request(lab: Lab) -> None:
    lab.is_cancelled = lambda request: not request.finished  # type: ignore[method-assign]
    backend = loaded_repeat(lab, config())
    arrays = {
        "IN": np.array([1], np.int32),
        "DELAY": np.array([1], np.uint32),
        "WAIT": np.array([2**32 - 1], np.uint32),
    }
    request = lab.request(arrays)
    backend.execute([request], lab.timings)
    backend.finalize()
    assert request.finished


def test_values_and_delays_must_have_the_same_length(lab: Lab) -> None:
    backend = loaded_repeat(lab, config())
    with pytest.raises(InvalidArgument, match=r"^expected IN and DELAY shape to match, got \[3\] and \[1\]$"):
        backend.execute([request_of(lab, [1, 2, 3], [0])], lab.timings)


def test_wrong_configurations_are_refused(lab: Lab) -> None:
    with pytest.raises(InvalidArgument, match="^repeat backend only supports models with max_batch_size == 0$"):
        loaded_repeat(lab, config(max_batch_size=4))
    with pytest.raises(InvalidArgument, match=r"^expected IN and DELAY shape to match, got \[4\] and \[-1\]$"):
        loaded_repeat(lab, config(4))
    with pytest.raises(InvalidArgument, match="^expected 3 inputs, got 0$"):
        loaded_repeat(lab, {"name": "empty"})


def loaded_square(lab: Lab, *, batched: bool = False, **parameters: str) -> SquareBackend:
    config = {
        "name": "square_int32",
        "max_batch_size": 8 if batched else 0,
        "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": ["1"]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": ["1"]}],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    backend = SquareBackend(lab)
    backend.load(ModelArguments(config, Path("repository/square_int32"), 1))
    return backend


def responses(lab: Lab, backend: SquareBackend, given: list[int] | list[list[int]]) -> list[object]:
    """Return the output values of the responses, or the error of a response with an error; not the empty ones."""
    request = lab.request({"IN": np.array(given, np.int32)})
    return [
        response if isinstance(response, ServingError) else response[0].array.tolist()
        for response in backend.responses(request)
        if response is not None
    ]


def test_a_request_with_n_has_n_responses(lab: Lab) -> None:
    backend = loaded_square(lab)
    assert responses(lab, backend, [3]) == [[3], [3], [3]]
    assert responses(lab, backend, [0]) == responses(lab, backend, [-1]) == []


def test_outputs_have_the_batch_dimension_of_the_input(lab: Lab) -> None:
    backend = loaded_square(lab, batched=True)
    assert responses(lab, backend, [[2]]) == [[[2]], [[2]]]
    with pytest.raises(InvalidArgument, match="^unexpected shape for IN input$"):
        responses(lab, backend, [[2], [2]])


def test_the_last_responses_may_be_errors_or_omitted(lab: Lab) -> None:
    backend = loaded_square(lab, CUSTOM_FAIL_COUNT="2", CUSTOM_EMPTY_COUNT="1", CUSTOM_INFER_DELAY_NS="1")
    first, *errors = responses(lab, backend, [4])
    assert first == [4]
    assert [(e.code, e.message) for e in errors if isinstance(e, ServingError)] == [
        (ErrorCode.UNKNOWN, "simulated failure")
    ] * 2
    assert len(errors) == 2


def test_parameters_that_are_not_numbers_are_ignored(lab: Lab) -> None:
    assert responses(lab, loaded_square(lab, CUSTOM_FAIL_COUNT="many", CUSTOM_EMPTY_COUNT="-1"), [1]) == [[1]]


def test_an_exception_is_the_last_response(lab: Lab) -> None:
    backend = loaded_square(lab, batched=True)
    request = lab.request({"IN": np.ones((2, 1), np.int32)})
    backend.execute([request], lab.timings)
    backend.finalize()
    assert lab.error(request).message == "unexpected shape for IN input"


INPUTS = (ExpectedTensor("IN", "INT32", dims=None), ExpectedTensor("WAIT", "UINT32"))

OUTPUTS = (ExpectedTensor("OUT", "INT32"),)


def tensor(name: str, data_type: str = "INT32", dims: tuple[int | str, ...] = (1,)) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": list(dims)}


def problem(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check_tensors({"input": inputs, "output": outputs}, INPUTS, OUTPUTS)
    return caught.value.message


GOOD = [tensor("IN", dims=("-1",)), tensor("WAIT", "UINT32")]


def test_a_model_with_exactly_the_required_tensors_is_accepted() -> None:
    check_tensors({"input": GOOD, "output": [tensor("OUT")]}, INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (GOOD[:1], [tensor("OUT")], "expected 2 inputs, got 1"),
        (GOOD, [], "expected 1 output, got 0"),
        (GOOD[::-1], [tensor("OUT")], "expected first input tensor name to be IN, got WAIT"),
        ([GOOD[0], tensor("X")], [tensor("OUT")], "expected second input tensor name to be WAIT, got X"),
        (GOOD, [tensor("X")], "expected first output tensor name to be OUT, got X"),
        ([tensor("IN", dims=(2, -1)), GOOD[1]], [tensor("OUT")], "expected IN shape to have one dimension, got [2,-1]"),
        (GOOD, [tensor("OUT", dims=(2,))], "expected OUT shape to be [1], got [2]"),
        ([GOOD[0], tensor("WAIT")], [tensor("OUT")], "expected WAIT datatype to be UINT32, got TYPE_INT32"),
    ],
)
def test_wrong_tensors_are_refused(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], message: str) -> None:
    assert problem(inputs, outputs) == message


def test_a_configuration_without_tensors_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="expected 2 inputs, got 0"):
        check_tensors({}, INPUTS, OUTPUTS)


def test_dimensions_may_be_strings_as_in_protobuf_json() -> None:
    assert dims_of({"dims": ["-1", 4]}) == (-1, 4)
    assert dims_of({}) == ()

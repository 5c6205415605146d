from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.builtin.square import SquareBackend
from kernel.errors import ErrorCode, InvalidArgument, ServingError

if TYPE_CHECKING:
    from tests.backends.conftest import Lab


def loaded(lab: Lab, *, batched: bool = False, **parameters: str) -> SquareBackend:
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
    backend = loaded(lab)
    assert responses(lab, backend, [3]) == [[3], [3], [3]]
    assert responses(lab, backend, [0]) == responses(lab, backend, [-1]) == []


def test_outputs_have_the_batch_dimension_of_the_input(lab: Lab) -> None:
    backend = loaded(lab, batched=True)
    assert responses(lab, backend, [[2]]) == [[[2]], [[2]]]
    with pytest.raises(InvalidArgument, match="^unexpected shape for IN input$"):
        responses(lab, backend, [[2], [2]])


def test_the_last_responses_may_be_errors_or_omitted(lab: Lab) -> None:
    backend = loaded(lab, CUSTOM_FAIL_COUNT="2", CUSTOM_EMPTY_COUNT="1", CUSTOM_INFER_DELAY_NS="1")
    first, *errors = responses(lab, backend, [4])
    assert first == [4]
    assert [(e.code, e.message) for e in errors if isinstance(e, ServingError)] == [
        (ErrorCode.UNKNOWN, "simulated failure")
    ] * 2
    assert len(errors) == 2


def test_parameters_that_are_not_numbers_are_ignored(lab: Lab) -> None:
    assert responses(lab, loaded(lab, CUSTOM_FAIL_COUNT="many", CUSTOM_EMPTY_COUNT="-1"), [1]) == [[1]]


def test_an_exception_is_the_last_response(lab: Lab) -> None:
    backend = loaded(lab, batched=True)
    request = lab.request({"IN": np.ones((2, 1), np.int32)})
    backend.execute([request], lab.timings)
    backend.finalize()
    assert lab.error(request).message == "unexpected shape for IN input"

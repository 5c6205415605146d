from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.python.instance import COMPARED_COUNT, OutputCheck
from backends.python.tensors import Tensor

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab

OUT = {"name": "OUT", "data_type": "TYPE_FP32", "dims": [2, -1]}


def warnings(tensor: Tensor, *, max_batch_size: int = 0, **output: Any) -> list[str]:
    config = {"output": [{**OUT, **output}], "max_batch_size": max_batch_size}
    return OutputCheck(config, {"OUT"}).warnings([tensor])


@pytest.mark.parametrize(
    ("array", "config"),
    [
        (np.zeros((2, 5), np.float32), {}),
        (np.zeros((3, 2, 5), np.float32), {"max_batch_size": 4}),
        (np.zeros((7,), np.float32), {"reshape": {"shape": [7]}}),
        (np.array([[b"a"], [b"b"]], object), {"data_type": "TYPE_STRING"}),
        (np.zeros(3, np.int8), {"data_type": "TYPE_INVALID"}),
    ],
)
def test_an_output_that_fits_is_not_reported(array: Any, config: dict[str, Any]) -> None:
    assert warnings(Tensor("OUT", array), **config) == []


@pytest.mark.parametrize(
    ("tensor", "config", "line"),
    [
        (
            Tensor("OUT", np.zeros((2, 1), np.int64)), {},
            "output 'OUT' is INT64, but its configuration and metadata say FP32: clients get INT64; change "
            "the model, or data_type in config.pbtxt",
        ),
        (
            Tensor("OUT", np.zeros((2, 1), np.float32)), {"max_batch_size": 4},
            "output 'OUT' has shape [2, 1], but its configuration and metadata say [-1, 2, -1]: clients get "
            "[2, 1]; change the model, or dims in config.pbtxt",
        ),
        (
            Tensor("out", np.zeros((2, 1), np.float32)), {},
            "output 'out' is not in the configuration, which has 'OUT': no client gets it; add it to "
            "'output' in config.pbtxt, or do not send it",
        ),
    ],
)  # fmt: skip
def test_an_output_that_does_not_fit_is_reported_with_what_to_change(
    tensor: Tensor, config: dict[str, Any], line: str
) -> None:
    assert warnings(tensor, **config) == [line]


def test_each_output_is_reported_once_and_only_the_first_responses_are_compared() -> None:
    check = OutputCheck({"output": [OUT]}, {"OUT"})
    wrong = [Tensor("OUT", np.zeros(1, np.int8))]
    assert len(check.warnings(wrong)) == 1
    assert check.warnings([]) == []
    for _ in range(COMPARED_COUNT - 1):
        assert not check.done
        assert check.warnings(wrong) == []
    assert check.done


@pytest.mark.parametrize("reshape", [None, {"shape": [1]}])
def test_a_model_is_reported_in_the_log_and_later_responses_take_no_call(lab: Lab, reshape: object) -> None:
    output = {"name": "OUT", "data_type": "TYPE_FP32", "dims": [1], **({"reshape": reshape} if reshape else {})}
    backend = lab.load(
        """
        def execute(self, requests):
            tensors = [pb_utils.Tensor(name, np.zeros(1, np.float32)) for name in ("OUT", "MORE")]
            return [pb_utils.InferenceResponse(tensors) for _ in requests]
        """,
        output=[output],
    )
    for _ in range(COMPARED_COUNT):
        assert [*lab.run().outputs] == ["OUT"]
    [(level, line)] = lab.logged
    assert level == "WARNING"
    assert line.startswith("output 'MORE' is not in the configuration, which has 'OUT': ")
    instance = backend._instance
    assert instance is not None
    assert instance.usual_outputs is (reshape is None)

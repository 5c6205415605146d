"""Which configurations the repeat and square backends refuse, in Triton's words."""

from __future__ import annotations

from typing import Any

import pytest

from backends.config_requirements import ExpectedTensor, check_tensors, dims_of
from kernel.errors import InvalidArgument

INPUTS = (ExpectedTensor("IN", "INT32", dims=None), ExpectedTensor("WAIT", "UINT32"))
OUTPUTS = (ExpectedTensor("OUT", "INT32"),)


def tensor(name: str, data_type: str = "INT32", dims: tuple[int | str, ...] = (1,)) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": list(dims)}


def problem(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check_tensors({"input": inputs, "output": outputs}, INPUTS, OUTPUTS)
    return caught.value.message


GOOD = [tensor("IN", dims=("-1",)), tensor("WAIT", "UINT32")]


def test_a_model_with_exactly_these_tensors_is_good() -> None:
    check_tensors({"input": GOOD, "output": [tensor("OUT")]}, INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
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
def test_what_is_wrong_is_said(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], said: str) -> None:
    assert problem(inputs, outputs) == said


def test_a_model_without_inputs_has_none() -> None:
    with pytest.raises(InvalidArgument, match="expected 2 inputs, got 0"):
        check_tensors({}, INPUTS, OUTPUTS)


def test_dimensions_are_written_as_text_by_protobuf() -> None:
    assert dims_of({"dims": ["-1", 4]}) == (-1, 4)
    assert dims_of({}) == ()

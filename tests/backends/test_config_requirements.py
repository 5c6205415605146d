"""Configurations that the repeat and square backends refuse, with Triton's texts."""

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

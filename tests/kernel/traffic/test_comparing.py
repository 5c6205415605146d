"""How outputs of two versions are compared."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel.traffic.comparing import (
    CompareArguments,
    ComparedSide,
    compare_outputs,
    compare_task,
    decode_result,
    encode_arguments,
)
from kernel.traffic.settings import OutputRule
from shm.arrays import to_bytes

if TYPE_CHECKING:
    from kernel.serving.helper_tasks import TaskResult
    from kernel.traffic.comparing import OutputDifference, Side


def side(values: Any, datatype: str = "FP32", shape: list[int] | None = None, *, classes: bool = False) -> Side:
    types = {"FP32": np.float32, "FP64": np.float64, "FP16": np.float16, "INT32": np.int32, "BYTES": object}
    array = np.array(values, types[datatype])
    data = bytes(to_bytes(array))
    return ComparedSide("OUT", datatype, list(array.shape) if shape is None else shape, data, classes=classes), data


def bf16(values: Any) -> Side:
    data = (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return ComparedSide("OUT", "BF16", [len(values)], data), data


def compared(first: Side, second: Side, rule: OutputRule | None = None) -> OutputDifference:
    [found] = compare_outputs([first], [second], {} if rule is None else {"OUT": rule})
    return found


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (side([1.0, 2.0]), side([1.0, 2.0]), ""),
        (side([1.0, 2.0]), side([1.00005, 2.0]), ""),
        (side([1.0, 2.0]), side([1.0, 2.001]), "values"),
        (side([0.0]), side([-0.0]), ""),
        (side([NAN, INF, -INF]), side([NAN, INF, -INF]), ""),
        (side([NAN]), side([1.0]), "values"),
        (side([1.0]), side([NAN]), "values"),
        (side([INF]), side([-INF]), "values"),
        (side([INF]), side([3e38]), "values"),
        (side([1.0], "FP64"), side([1.00001], "FP64"), "values"),
        (side([1.0], "FP16"), side([1.005], "FP16"), ""),
        (side([1.0], "FP16"), side([1.1], "FP16"), "values"),
        (bf16([1.0, 2.0]), bf16([1.02, 2.0]), ""),
        (bf16([1.0, 2.0]), bf16([1.25, 2.0]), "values"),
        (side([1, 2], "INT32"), side([1, 3], "INT32"), "values"),
        (side([1, 2], "INT32"), side([1.0, 2.0]), "datatype"),
        (side([1.0, 2.0]), side([[1.0, 2.0]]), "shape"),
        (side([b"a", b"b"], "BYTES"), side([b"a", b"c"], "BYTES"), "values"),
        (side([b"a"], "BYTES"), side([b"a"], "BYTES"), ""),
    ],
)
def test_values_are_compared_with_the_tolerances_of_their_datatype(first: Side, second: Side, kind: str) -> None:
    found = compared(first, second)
    assert found.kind == kind
    assert bool(found.text) == bool(kind)
    assert (found.distance > 1) == bool(kind)


@pytest.mark.parametrize(
    ("rule", "first", "second", "kind"),
    [
        (OutputRule("exact"), side([1.0]), side([1.0000001]), "values"),
        (OutputRule("ignore"), side([1.0]), side([9.0]), None),
        (OutputRule(relative=0.1), side([1.0]), side([1.05]), ""),
        (OutputRule(relative=0, absolute=0), side([1.0]), side([1.0000001]), "values"),
        (OutputRule(absolute=2), side([7], "INT32"), side([9], "INT32"), ""),
        (OutputRule("top1"), side([[0.1, 0.9], [0.7, 0.3]]), side([[0.4, 0.6], [0.9, 0.1]]), ""),
        (OutputRule("top1"), side([[0.1, 0.9], [0.7, 0.3]]), side([[0.1, 0.9], [0.3, 0.7]]), "values"),
        (OutputRule("top1"), side([[0.5, 0.500001]]), side([[0.500001, 0.5]]), ""),
        (OutputRule("top1"), side([[0.5, NAN]]), side([[0.5, 0.4]]), "values"),
        (OutputRule("top1"), side([[NAN, NAN]]), side([[NAN, 0.4]]), "values"),
        (OutputRule("top1"), side([[NAN, 0.4]]), side([[NAN, NAN]]), "values"),
        (OutputRule("top1"), side([[NAN, 0.4, 0.1]]), side([[NAN, 0.3, 0.2]]), ""),
        (OutputRule("top1"), side([[NAN, 0.4, 0.1]]), side([[0.4, NAN, 0.1]]), "values"),
        (OutputRule("order", top=2), side([[3.0, 2.0, 1.0]]), side([[9.0, 8.0, 7.0]]), ""),
        (OutputRule("order", top=2), side([[3.0, 2.0, 1.0]]), side([[9.0, 7.0, 8.0]]), "values"),
        (OutputRule("order", top=1), side([[3.0, 2.0, 1.0]]), side([[9.0, 7.0, 8.0]]), ""),
    ],
)
def test_a_rule_of_an_output_says_what_counts(rule: OutputRule, first: Side, second: Side, kind: str | None) -> None:
    found = [each.kind for each in compare_outputs([first], [second], {"OUT": rule})]
    assert found == ([] if kind is None else [kind])


@pytest.mark.parametrize(
    ("first", "second", "rule", "kind"),
    [
        (["0.9:1:cat", "0.1:0:dog"], ["0.90001:1:cat", "0.1:0:dog"], OutputRule(), ""),
        (["0.9:1:cat", "0.1:0:dog"], ["0.8:1:cat", "0.2:0:dog"], OutputRule(), "values"),
        (["0.9:1:cat", "0.1:0:dog"], ["0.8:1:cat", "0.2:0:dog"], OutputRule("order"), ""),
        (["0.9:1:cat", "0.1:0:dog"], ["0.8:0:dog", "0.2:1:cat"], OutputRule("order"), "values"),
        (["0.5:1", "0.5:0"], ["0.5:0", "0.5:1"], OutputRule(), ""),
        (["0.5:1"], ["x"], OutputRule(), "values"),
        (["0.5:1", "0.5:0"], ["0.5:0"], OutputRule(), "values"),
        (["nan:1", "0.5:0"], ["nan:1", "0.50001:0"], OutputRule(), ""),
        (["nan:1", "0.5:0"], ["0.5:1", "0.5:0"], OutputRule(), "values"),
    ],
)
def test_best_classes_are_compared_by_their_order_and_scores(
    first: list[str], second: list[str], rule: OutputRule, kind: str
) -> None:
    one, two = (side([each.encode() for each in texts], "BYTES", [2], classes=True) for texts in (first, second))
    assert compared(one, two, rule).kind == kind


def test_outputs_of_one_side_only_are_differences() -> None:
    found = compare_outputs([side([1.0])], [], {})
    assert [(each.kind, each.text) for each in found] == [("missing", "the shadow does not have it")]
    assert [each.kind for each in compare_outputs([], [side([1.0])], {})] == ["missing"]
    assert compare_outputs([], [side([1.0])], {"OUT": OutputRule("ignore")}) == []


def test_the_worst_element_is_named_also_behind_the_first_piece() -> None:
    a = np.zeros((1 << 20) + 7, np.float32)
    b = a.copy()
    b[5], b[(1 << 20) + 3] = 1, 5
    found = compared(side(a), side(b))
    assert (found.kind, round(found.distance)) == ("values", 500_000)
    assert found.text.startswith(f"element {(1 << 20) + 3} is 5.0, and 0.0 with the version")


def test_bytes_that_do_not_fit_the_shape_are_a_difference_and_no_error() -> None:
    for datatype, data in (("FP32", b"123"), ("BYTES", b"\x09\0\0\0a"), ("FP32", bytes(12)), ("NEW", b"1")):
        first = ComparedSide("OUT", datatype, [2], data), data
        assert compared(first, (first[0], bytes(8))).kind == "values"


def test_random_bytes_never_break_a_comparison() -> None:
    random_ = random.Random(5)
    for _ in range(2000):
        datatype = random_.choice(["FP32", "FP16", "BF16", "INT8", "BYTES", "BOOL", "FP64", "UINT64"])
        shape = [random_.randrange(4) for _ in range(random_.randrange(3))]
        rule = OutputRule(random_.choice(["close", "exact", "top1", "order"]), top=3)
        one, two = (random_.randbytes(random_.randrange(40)) for _ in range(2))
        made = ComparedSide("OUT", datatype, shape, None, classes=bool(random_.randrange(2)))
        found = compared((made, one), (made, two), rule)
        assert found.kind in ("", "values")
        assert compared((made, one), (made, bytes(one)), rule).kind == ""


def test_the_task_reads_large_outputs_from_its_sources() -> None:
    first, second = side([1.0, 2.0])[1], side([1.0, 3.0])[1]
    sides = [ComparedSide("OUT", "FP32", [2], None, number) for number in (0, 1)]
    arguments = encode_arguments(CompareArguments([sides[0]], [sides[1]], {}))
    steps = compare_task(arguments, [memoryview(first), memoryview(second)])
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    result: TaskResult = stopped.value.value
    assert [each.kind for each in decode_result(result.message)] == ["values"]

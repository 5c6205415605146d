from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.batch_input import BatchInput, batch_input_arrays, batch_inputs_of
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from tests.backends.conftest import Lab


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

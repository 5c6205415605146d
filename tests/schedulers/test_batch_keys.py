"""Which requests may share a batch."""

from __future__ import annotations

import msgspec

from kernel.serving.request import Request
from kernel.testing import RecordingSink, model_spec
from schedulers.dynamic_batcher import BatchKeys
from shm.tensor import Tensor


def request(**shapes: list[int]) -> Request:
    return Request("m", [Tensor(name, "FP32", shape, b"") for name, shape in shapes.items()], RecordingSink())


def test_fixed_shapes_need_no_key() -> None:
    keys = BatchKeys(model_spec(max_batch_size=8, dims=(4,)))
    assert keys.key(request(IN=[1, 4])) is None


def test_variable_shapes_must_be_equal_but_for_the_rows() -> None:
    keys = BatchKeys(model_spec(max_batch_size=8, dims=(-1,)))
    assert keys.key(request(IN=[1, 4])) == keys.key(request(IN=[3, 4]))
    assert keys.key(request(IN=[1, 4])) != keys.key(request(IN=[1, 5]))


def test_with_optional_inputs_the_same_ones_must_be_there() -> None:
    spec = model_spec(max_batch_size=8, dims=(4,))
    optional = msgspec.structs.replace(spec.inputs["IN"], name="MORE", optional=True)
    keys = BatchKeys(msgspec.structs.replace(spec, inputs={**spec.inputs, "MORE": optional}))
    assert keys.key(request(IN=[1, 4])) != keys.key(request(IN=[1, 4], MORE=[1, 4]))
    assert keys.key(request(IN=[1, 4], MORE=[1, 4])) == keys.key(request(MORE=[2, 4], IN=[2, 4]))

"""A batch for models with X = A + B and Y = A - B, each of four floats, whatever file the model has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from backends.base import Backend
    from shm.arrays import Array
    from tests.backends.conftest import Lab


def floats(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def check_rows_of_a_batch(lab: Lab, backend: Backend) -> None:
    """Each request of a batch gets its own rows, and only the outputs that it names."""
    one = lab.request({"A": floats(1, 4), "B": np.ones((1, 4), np.float32)})
    two = lab.request({"B": floats(2, 4), "A": floats(2, 4)}, outputs=["Y"])
    backend.execute([one, two], lab.timings)
    assert lab.outputs(one)["X"].tolist() == [[1, 2, 3, 4]]
    assert lab.outputs(one)["Y"].tolist() == [[-1, 0, 1, 2]]
    assert list(lab.outputs(two)) == ["Y"]
    assert lab.outputs(two)["Y"].tolist() == [[0] * 4] * 2
    assert lab.timings.start_ns < lab.timings.inputs_ready_ns < lab.timings.inferred_ns

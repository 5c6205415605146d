from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.builtin.repeat import RepeatBackend
from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from backends.worker.request import WorkerRequest
    from tests.backends.conftest import Lab


def tensor(name: str, data_type: str, dim: int) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": [str(dim)]}


def config(in_dim: int = -1, delay_dim: int = -1, **more: Any) -> dict[str, Any]:
    return {
        "name": "repeat_int32",
        "input": [tensor("IN", "INT32", in_dim), tensor("DELAY", "UINT32", delay_dim), tensor("WAIT", "UINT32", 1)],
        "output": [tensor("OUT", "INT32", 1), tensor("IDX", "UINT32", 1)],
        **more,
    }


def loaded(lab: Lab, configured: dict[str, Any]) -> RepeatBackend:
    backend = RepeatBackend(lab)
    backend.load(ModelArguments(configured, Path("repository/repeat_int32"), 1))
    return backend


def request_of(lab: Lab, values: list[int], delays: list[int]) -> WorkerRequest:
    arrays = {"IN": np.array(values, np.int32), "DELAY": np.array(delays, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    return lab.request(arrays)


def test_each_element_is_a_response_with_its_index(lab: Lab) -> None:
    backend = loaded(lab, config())
    responses = list(backend.responses(request_of(lab, [5, -7, 5], [0, 1, 0])))
    shown = [[(o.name, o.datatype, o.array.dtype, o.array.tolist()) for o in outputs] for outputs in responses]
    assert shown == [
        [("OUT", "INT32", np.int32, [value]), ("IDX", "UINT32", np.uint32, [index])]
        for index, value in enumerate([5, -7, 5])
    ]


def test_finalize_waits_for_the_last_responses(lab: Lab) -> None:
    backend = loaded(lab, config())
    requests = [request_of(lab, [1, 2, 3], [0, 0, 0]), request_of(lab, [], [])]
    for request in requests:
        backend.execute([request], lab.timings)
    backend.finalize()
    assert lab.outputs(requests[0])["OUT"].tolist() == [3]
    assert requests[1].finished


def test_the_instance_does_not_wait_for_a_cancelled_request(lab: Lab) -> None:
    lab.is_cancelled = lambda request: not request.finished  # type: ignore[method-assign]
    backend = loaded(lab, config())
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
    backend = loaded(lab, config())
    with pytest.raises(InvalidArgument, match=r"^expected IN and DELAY shape to match, got \[3\] and \[1\]$"):
        backend.execute([request_of(lab, [1, 2, 3], [0])], lab.timings)


def test_wrong_configurations_are_refused(lab: Lab) -> None:
    with pytest.raises(InvalidArgument, match="^repeat backend only supports models with max_batch_size == 0$"):
        loaded(lab, config(max_batch_size=4))
    with pytest.raises(InvalidArgument, match=r"^expected IN and DELAY shape to match, got \[4\] and \[-1\]$"):
        loaded(lab, config(4))
    with pytest.raises(InvalidArgument, match="^expected 3 inputs, got 0$"):
        loaded(lab, {"name": "empty"})

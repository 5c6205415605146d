from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.registry import backend_class
from backends.transport import wire
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from backends.base import Backend
    from tests.backends.conftest import Lab


def tensors(kind: str, data_type: str = "TYPE_FP32", **more: Any) -> list[dict[str, Any]]:
    return [{"name": f"{kind}{number}", "data_type": data_type, "dims": [2], **more} for number in range(2)]


def loaded(lab: Lab, **config: Any) -> Backend:
    given = {"name": "m", "max_batch_size": 8, "input": tensors("INPUT"), "output": tensors("OUTPUT"), **config}
    arguments = ModelArguments(given, Path("m"), 1, "m_0")
    backend = backend_class("add_sub", arguments)(lab)
    backend.load(arguments)
    return backend


def test_a_batch_is_added_and_subtracted_and_reported(lab: Lab) -> None:
    backend = loaded(lab)
    ones = np.ones((1, 2), np.float32)
    first = lab.request({"INPUT0": ones, "INPUT1": ones * 2})
    second = lab.request({"INPUT0": np.ones((3, 2), np.float32) * 5, "INPUT1": np.ones((3, 2), np.float32)})
    backend.execute([first, second], lab.timings)
    assert lab.outputs(first)["OUTPUT0"].tolist() == [[3, 3]]
    assert lab.outputs(first)["OUTPUT1"].tolist() == [[-1, -1]]
    assert lab.outputs(second)["OUTPUT1"].tolist() == [[4, 4]] * 3
    assert lab.timings.executions is not None
    [(rows, _)] = lab.timings.executions
    assert rows == 4
    lab.collector.flush(1, lab.timings.executions)
    [message] = lab.reported
    assert isinstance(message, wire.Reported)
    assert [report.request for report in message.requests] == [first.ref.number, second.ref.number]
    assert lab.logged == []
    backend.finalize()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"input": tensors("INPUT")[:1]}, "must have INPUT0 and INPUT1, got INPUT0"),
        ({"output": []}, "must have OUTPUT0 and OUTPUT1, got none"),
        ({"output": tensors("OUTPUT", "TYPE_INT32")}, "the same shape and the same numeric datatype"),
        ({"input": tensors("INPUT", "TYPE_STRING"), "output": tensors("OUTPUT", "TYPE_STRING")}, "numeric datatype"),
    ],
)
def test_a_model_with_other_tensors_is_refused(lab: Lab, config: dict[str, Any], text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        loaded(lab, **config)

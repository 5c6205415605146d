from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.builtin.identity import IdentityBackend
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from tests.backends.conftest import Lab


def tensor(name: str, data_type: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": [6], **more}


def loaded(lab: Lab, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> IdentityBackend:
    config = {"name": "identity", "max_batch_size": 8, "input": inputs, "output": outputs}
    backend = IdentityBackend(lab)
    backend.load(ModelArguments(config, Path("repository/identity"), 1))
    return backend


def test_outputs_equal_the_inputs_in_the_order_of_the_configuration(lab: Lab) -> None:
    backend = loaded(lab, [tensor("A"), tensor("B", "TYPE_STRING")], [tensor("X"), tensor("Y", "TYPE_STRING")])
    strings = np.array([[b"a", b"", b"c", b"d", b"e", b"f"]], object)
    request = lab.request({"B": strings, "A": np.ones((1, 6), np.float32)})
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["X"].tolist() == [[1] * 6]
    assert lab.outputs(request)["Y"].tolist() == strings.tolist()


def test_an_output_is_written_to_its_destination(lab: Lab) -> None:
    lab.reserves = True
    backend = loaded(lab, [tensor("A")], [tensor("X")])
    requests = [lab.request({"A": np.full((size, 6), size, np.float32)}) for size in (1, 2)]
    backend.execute(requests, lab.timings)
    assert lab.in_place == ["X", "X"]
    assert lab.outputs(requests[1])["X"].tolist() == [[2] * 6] * 2


def test_reshapes_of_input_and_output_are_applied(lab: Lab) -> None:
    backend = loaded(
        lab,
        [tensor("A", reshape={"shape": [2, 3]})],
        [{"name": "X", "data_type": "TYPE_FP32", "dims": [3, 2], "reshape": {"shape": [2, 3]}}],
    )
    request = lab.request({"A": np.arange(6, dtype=np.float32).reshape(1, 6)})
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["X"].tolist() == [[[0, 1], [2, 3], [4, 5]]]


def test_outputs_that_are_not_requested_are_omitted(lab: Lab) -> None:
    backend = loaded(lab, [tensor(n, optional=True) for n in "AB"], [tensor(n) for n in "XY"])
    array = np.ones((1, 6), np.float32)
    request = lab.request({"A": array, "B": array}, outputs=["Y"])
    backend.execute([request], lab.timings)
    assert list(lab.outputs(request)) == ["Y"]


@pytest.mark.parametrize(
    ("data_type", "zeros"), [("TYPE_FP32", 0.0), ("TYPE_BF16", 0), ("TYPE_STRING", b""), ("TYPE_BOOL", False)]
)
def test_the_output_of_an_optional_input_that_is_omitted_is_zeros(lab: Lab, data_type: str, zeros: object) -> None:
    inputs = [tensor("A", optional=True), tensor("B", data_type, optional=True) | {"dims": [2, -1]}]
    backend = loaded(lab, inputs, [tensor("X"), tensor("Y", data_type) | {"dims": [2, -1]}])
    request = lab.request({"A": np.ones((3, 6), np.float32)})
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["Y"].tolist() == [[[zeros]] * 2] * 3
    alone = lab.request({"A": np.ones((3, 6), np.float32)}, outputs=["Y"])
    backend.execute([alone], lab.timings)
    assert list(lab.outputs(alone)) == ["Y"]


def test_a_model_whose_outputs_do_not_match_its_inputs_is_refused(lab: Lab) -> None:
    with pytest.raises(BadConfig, match="as many outputs as inputs, got 1 inputs and 0 outputs"):
        loaded(lab, [tensor("A")], [])
    with pytest.raises(BadConfig, match="must have the same datatype, got FP32 and BF16"):
        loaded(lab, [tensor("A")], [tensor("X", "TYPE_BF16")])


def slow(lab: Lab, monkeypatch: pytest.MonkeyPatch, instance: str, parameters: dict[str, str]) -> list[float]:
    """Return how long a model with `parameters` sleeps while it loads, and while it executes."""
    slept: list[float] = []
    monkeypatch.setattr("backends.builtin.identity.time.sleep", slept.append)
    config: dict[str, Any] = {"name": "identity", "input": [tensor("A")], "output": [tensor("X")]}
    config["parameters"] = {key: {"string_value": value} for key, value in parameters.items()}
    backend = IdentityBackend(lab)
    backend.load(ModelArguments(config, Path("repository/identity"), 1, instance))
    backend.execute([lab.request({"A": np.ones(6, np.float32)})], lab.timings)
    return [seconds for seconds in slept if seconds]


def test_a_model_loads_and_executes_as_slowly_as_its_parameters_say(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow(lab, monkeypatch, "identity_0", {}) == []
    assert slow(lab, monkeypatch, "identity_0", {"creation_delay_sec": "3", "execute_delay_ms": "20"}) == [3, 0.02]


@pytest.mark.parametrize(("instance", "delays"), [(0, 1), (1, 4), (2, 8)])
def test_the_delay_of_an_instance_grows_with_its_number(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, instance: int, delays: int
) -> None:
    parameters = {"execute_delay_ms": "100", "instance_wise_delay_multiplier": "4"}
    assert slow(lab, monkeypatch, f"identity_0_{instance}", parameters) == pytest.approx([0.1 * delays])


def test_a_delay_that_is_no_number_fails_the_load(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadConfig, match="'execute_delay_ms' of model 'identity' must be a number"):
        slow(lab, monkeypatch, "identity_0", {"execute_delay_ms": "soon"})

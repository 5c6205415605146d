from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.python import instance
from backends.python import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab


def test_models_import_the_installed_module(lab: Lab) -> None:
    lab.load("""
        from backends.python import triton_python_backend_utils as same

        class TritonPythonModel:
            def execute(self, requests):
                return [text(same is pb_utils)]
    """)
    assert lab.text() == "True"


def test_tensors_are_found_by_name() -> None:
    tensor = pb_utils.Tensor("A", np.zeros(1))
    request = pb_utils.InferenceRequest(model_name="m", inputs=[tensor], requested_output_names=[])
    response = pb_utils.InferenceResponse([tensor])
    assert pb_utils.get_input_tensor_by_name(request, "A") is tensor
    assert pb_utils.get_input_tensor_by_name(request, "B") is None
    assert pb_utils.get_output_tensor_by_name(response, "A") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "B") is None


def test_configurations_of_tensors_are_found_by_name() -> None:
    config = {"input": [{"name": "A"}], "output": [{"name": "B"}]}
    assert pb_utils.get_input_config_by_name(config, "A") == {"name": "A"}
    assert pb_utils.get_input_config_by_name(config, "B") is None
    assert pb_utils.get_output_config_by_name(config, "B") == {"name": "B"}
    assert pb_utils.get_output_config_by_name({}, "B") is None


def test_a_configuration_says_whether_it_is_decoupled() -> None:
    decoupled = pb_utils.using_decoupled_model_transaction_policy
    assert decoupled({"model_transaction_policy": {"decoupled": True}})
    assert not decoupled({"model_transaction_policy": {"decoupled": False}})
    assert not decoupled({})


def test_constants_are_triton_s() -> None:
    assert pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START == 1
    assert pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END == 2
    assert pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL == 1
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL == 1
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE == 2


def test_outside_a_worker_there_is_no_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "_current", None)
    with pytest.raises(RuntimeError, match="only inside a model"):
        pb_utils.get_model_dir()

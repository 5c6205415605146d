import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Calls another model in `initialize`, which is not possible."""

    def initialize(self, args):
        pb_utils.InferenceRequest(
            model_name="versions",
            requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("IN", np.array([1], np.int32))],
        ).exec()

    def execute(self, requests):
        return []

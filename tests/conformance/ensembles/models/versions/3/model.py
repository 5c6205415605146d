import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Multiplies by its version."""

    def initialize(self, args):
        self.version = np.int32(args["model_version"])

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() * self.version)]
            )
            for r in requests
        ]

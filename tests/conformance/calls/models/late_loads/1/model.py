import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Loads another model in `initialize`."""

    def initialize(self, args):
        before = pb_utils.is_model_ready("late_pair")
        pb_utils.load_model("late_pair")
        self.seen = f"{before} {pb_utils.is_model_ready('late_pair')} {pb_utils.is_model_ready('late_pair', '7')}"

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([self.seen.encode()], np.object_))])
            for _ in requests
        ]

"""Puts its weights on the device that its instance is for, and says which that is."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.kind = args["model_instance_kind"]
        self.device = "cpu" if self.kind == "CPU" else f"cuda:{args['model_instance_device_id']}"
        self.weights = np.array([2, 3], np.float32)

    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN")
            where = "cpu" if given.is_cpu() else "gpu"
            kind = np.array([self.kind.encode(), f"{self.device} {where}".encode()], object)
            out = given.as_numpy() * self.weights
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("KIND", kind), pb_utils.Tensor("OUT", out)]))
        return responses

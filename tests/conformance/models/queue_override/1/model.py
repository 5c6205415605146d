import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sleeps as long as its first request says. Returns which execution it was since 1 was sent, and of how many."""

    def initialize(self, args):
        self.executions = 0

    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "MS").as_numpy() for request in requests]
        if values[0].flat[0] % 10 == 1:
            self.executions = 0
        time.sleep(int(values[0].flat[0]) / 1000)
        self.executions += 1
        responses = []
        for value in values:
            rows = np.ones((value.shape[0], 1), np.int32)
            order = pb_utils.Tensor("ORDER", rows * self.executions)
            together = pb_utils.Tensor("TOGETHER", rows * len(requests))
            responses.append(pb_utils.InferenceResponse([order, together]))
        return responses

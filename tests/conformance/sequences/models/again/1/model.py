"""Executes each request IN times: reschedules it, and responds at last with the number of executions."""

import numpy as np
import triton_python_backend_utils as pb_utils


def value(request, name):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0])


class TritonPythonModel:
    def initialize(self, args):
        self.counts = {}
        self.flags = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            number = value(request, "CORRID")
            if value(request, "START"):
                self.counts[number], self.flags[number] = 0, ""
            self.counts[number] = self.counts.get(number, 0) + 1
            self.flags[number] = self.flags.get(number, "") + str(request.flags())
            if self.counts[number] < value(request, "IN"):
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
                continue
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("SUM", np.array([[self.counts[number]]], np.int32)),
                        pb_utils.Tensor("SEEN", np.array([[self.flags[number].encode()]], object)),
                    ]
                )
            )
        return responses

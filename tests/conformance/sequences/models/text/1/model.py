"""Adds up the values of each sequence, and shows the control tensors. A negative value is a wait in milliseconds."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


def value(request, name):
    found = pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0]
    return found.decode() if isinstance(found, bytes) else found


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            number, given = value(request, "CORRID"), int(value(request, "IN"))
            if value(request, "READY"):
                if value(request, "START"):
                    self.sums[number] = 0
                if given < 0:
                    time.sleep(-given / 1000)
                else:
                    self.sums[number] = self.sums.get(number, 0) + given
            seen = f"{value(request, 'START')} {value(request, 'END')} {number} {request.flags()}"
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("SUM", np.array([[self.sums.get(number, 0)]], np.int32)),
                        pb_utils.Tensor("SEEN", np.array([[seen.encode()]], object)),
                    ]
                )
            )
        return responses

"""A decoupled model: it sends any number of responses to one request."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            limit = int(pb_utils.get_input_tensor_by_name(request, "limit").as_numpy()[0])
            sender = request.get_response_sender()
            for number in range(1, limit + 1):
                if request.is_cancelled():
                    break
                output = pb_utils.Tensor("number", np.array([number], dtype=np.int32))
                sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

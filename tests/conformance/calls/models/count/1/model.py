import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Counts to N. Below 0 it counts to -N, the last response is final, and above 1000 there is an error among them."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            n = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            count = abs(n) % 1000
            for number in range(count):
                last = n < 0 and number == count - 1
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))])
                if abs(n) > 1000 and number == 1:
                    error = pb_utils.TritonError("not this one", pb_utils.TritonError.NOT_FOUND)
                    response = pb_utils.InferenceResponse(error=error)
                sender.send(response, flags=FINAL if last else 0)
            if n >= 0:
                sender.send(flags=FINAL)
        return

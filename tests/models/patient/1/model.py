import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends numbers until its client has gone, and then says so."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            number = 0
            while not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
                number += 1
            print("client is gone", flush=True)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

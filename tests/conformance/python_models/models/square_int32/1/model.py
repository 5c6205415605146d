"""Responds to n with n responses of n, from a thread; the last one has the final flag."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            threading.Thread(target=self.respond, args=(request.get_response_sender(), count)).start()

    def respond(self, sender, count):
        for number in range(count):
            last = number == count - 1
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([count], np.int32))])
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
        if not count:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

"""Repeats its input in one response for each element, from a thread, each after its delay in ms."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.lock = threading.Lock()
        self.count = 0

    def execute(self, requests):
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            delays = pb_utils.get_input_tensor_by_name(request, "DELAY").as_numpy()
            wait = pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()[0]
            thread = threading.Thread(
                target=self.respond, args=(request.get_response_sender(), values, delays), daemon=True
            )
            with self.lock:
                self.count += 1
            thread.start()
            time.sleep(wait / 1000)
        return

    def respond(self, sender, values, delays):
        for index, (value, delay) in enumerate(zip(values, delays, strict=False)):
            time.sleep(delay / 1000)
            outputs = [
                pb_utils.Tensor("OUT", np.array([value], np.int32)),
                pb_utils.Tensor("IDX", np.array([index], np.uint32)),
            ]
            sender.send(pb_utils.InferenceResponse(outputs))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.lock:
            self.count -= 1

    def finalize(self):
        while self.count:
            time.sleep(0.01)

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends COUNT responses; for -1 an error, for -2 two responses with an error between them."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            for number in range(count if count >= 0 else 2):
                if count == -1:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no stream")))
                    break
                if count == -2 and number:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("the stream broke")))
                tensors = [
                    pb_utils.Tensor("NUMBER", np.array([number], np.int32)),
                    pb_utils.Tensor("PAIR", np.array([number, -number if count > 100 else number], np.int32)),
                ]
                sender.send(pb_utils.InferenceResponse(tensors))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Streams COUNT tokens; the one with the number FAIL_AT is an error."""

    def execute(self, requests):
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()[0].decode()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            fail_at = pb_utils.get_input_tensor_by_name(request, "FAIL_AT")
            failing = -1 if fail_at is None else int(fail_at.as_numpy()[0])
            sender = request.get_response_sender()
            for number in range(count):
                if number == failing:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"token {number} failed")))
                    continue
                token = np.array([f"{prompt} {number}".encode()], object)
                index = np.array([number], np.int32)
                sender.send(
                    pb_utils.InferenceResponse([pb_utils.Tensor("TOKEN", token), pb_utils.Tensor("INDEX", index)])
                )
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

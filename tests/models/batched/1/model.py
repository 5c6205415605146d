import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Doubles its input and tells how many requests were executed together."""

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            count = np.full((value.shape[0], 1), len(requests), np.int32)
            tensors = [pb_utils.Tensor("OUT", value * 2), pb_utils.Tensor("REQUESTS", count)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Doubles. Fails for negative numbers, and altogether for large ones."""

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if (value > 1000).any():
                raise ValueError("a large number")
            if (value < 0).any():
                error = pb_utils.TritonError("a negative number", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value * 2)]))
        return responses

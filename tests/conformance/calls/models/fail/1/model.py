import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Fails as its input says."""

    def execute(self, requests):
        responses = []
        for request in requests:
            kind = pb_utils.get_input_tensor_by_name(request, "KIND")
            name = kind.as_numpy()[0].decode()
            if name == "RAISE":
                raise ValueError("the model raises")
            if name == "OK":
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", kind.as_numpy())]))
            else:
                code = getattr(pb_utils.TritonError, name)
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"failed: {name}", code)))
        return responses

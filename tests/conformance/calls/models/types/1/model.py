import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns its inputs."""

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT" + tensor.name()[2:], tensor.as_numpy()) for tensor in request.inputs()]
            )
            for request in requests
        ]

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Tells the shapes that it sees."""

    def execute(self, requests):
        responses = []
        for request in requests:
            told = str([list(tensor.as_numpy().shape) for tensor in sorted(request.inputs(), key=lambda t: t.name())])
            pairs = pb_utils.get_input_tensor_by_name(request, "PAIRS").as_numpy()
            shapes = np.array([[told]] * len(pairs), object)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("SHAPES", shapes), pb_utils.Tensor("BACK", pairs)])
            )
        return responses

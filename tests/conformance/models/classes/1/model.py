import numpy as np
import triton_python_backend_utils as pb_utils

DTYPES = {
    "NAMED": np.float32,
    "BARE": np.float64,
    "SMALL": np.int8,
    "LARGE": np.uint64,
    "HALF": np.float16,
    "YES": np.bool_,
    "TEXT": np.bytes_,
}


class TritonPythonModel:
    """Gives its input back in several data types."""

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            wanted = request.requested_output_names()
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor(name, value.astype(DTYPES[name])) for name in sorted(wanted)]
                )
            )
        return responses

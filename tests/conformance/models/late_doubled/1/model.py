import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Doubles IN; fails for 13; tells the parameters, the id and the correlation id of the request."""

    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if 13 in given:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("thirteen")))
                continue
            told = f"{request.request_id()} {request.correlation_id()} {request.parameters()}"
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("OUT", given * np.int32(2)),
                        pb_utils.Tensor("TOLD", np.full(given.shape, told, dtype=object)),
                    ]
                )
            )
        return responses

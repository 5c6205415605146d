import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with what it was told about the request beside its tensors."""

    def execute(self, requests):
        responses = []
        for request in requests:
            told = {
                "id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "flags": request.flags(),
                "parameters": json.loads(request.parameters()),
                "timeout": request.timeout(),
                "wanted": sorted(request.requested_output_names()),
            }
            text = json.dumps(told, sort_keys=True).encode()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([text], object))]))
        return responses

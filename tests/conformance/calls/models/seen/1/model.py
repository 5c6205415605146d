import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns what it sees of a request."""

    def execute(self, requests):
        responses = []
        for request in requests:
            seen = {
                "id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "flags": request.flags(),
                "timeout": request.timeout(),
                "parameters": json.loads(request.parameters() or "{}"),
                "outputs": sorted(request.requested_output_names()),
            }
            text = np.array([json.dumps(seen, sort_keys=True).encode()], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text), pb_utils.Tensor("OTHER", text)]))
        return responses

"""Tells what it sees of its request: properties, parameters, tensors."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seen = {
                "id": request.request_id(),
                "correlation": request.correlation_id(),
                "flags": request.flags(),
                "timeout": request.timeout(),
                "parameters": json.loads(request.parameters()),
                "wanted": sorted(request.requested_output_names()),
                "cancelled": request.is_cancelled(),
                "inputs": [
                    [tensor.name(), list(tensor.shape()), tensor.as_numpy().tolist()]
                    for tensor in request.inputs()
                    if tensor.name() != "TEXT"
                ],
            }
            text = pb_utils.get_input_tensor_by_name(request, "TEXT")
            if text is not None:
                seen["text"] = [value.hex() for value in text.as_numpy().reshape(-1)]
            told = np.array([[json.dumps(seen, sort_keys=True).encode()]], object)
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            outputs = [pb_utils.Tensor("OUT", given), pb_utils.Tensor("TOLD", told)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses

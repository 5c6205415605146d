import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Tells what it was asked, for /generate."""

    def execute(self, requests):
        responses = []
        for request in requests:
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            parameters = json.dumps(json.loads(request.parameters()), sort_keys=True)
            text = f"{given['PROMPT'][0].decode()} {parameters}".encode()
            shapes = [f"{name} {list(given[name].shape)}".encode() for name in sorted(given)]
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("TEXT", np.array([text], object)),
                        pb_utils.Tensor("SHAPES", np.array(shapes, object)),
                    ]
                )
            )
        return responses

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Adds up the IN of each sequence, and tells what it got. A negative IN of -n takes n milliseconds."""

    def initialize(self, args):
        self.sums = {}
        config = json.loads(args["model_config"])
        self.names = [each["name"] for each in config["sequence_batching"]["control_input"]]

    def execute(self, requests):
        responses = []
        for request in requests:
            controls = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self.names}
            told = {n: t.as_numpy().reshape(-1).tolist() for n, t in controls.items() if t is not None}
            told = {n: [v.decode() if isinstance(v, bytes) else v for v in values] for n, values in told.items()}
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            value = int(given.reshape(-1)[0])
            if value < 0:
                time.sleep(-value / 1000)
            key = str(request.correlation_id())
            ready = bool(told.get("READY", [1])[0])
            if ready:
                if told.get("START", [request.flags() & 1])[0]:
                    self.sums[key] = 0
                self.sums[key] = self.sums.get(key, 0) + value
            shape = (1, 1) if given.ndim == 2 else (1,)
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("SUM", np.full(shape, self.sums.get(key, 0), np.int32)),
                        pb_utils.Tensor("TOLD", np.array([json.dumps(told)], dtype=object).reshape(shape)),
                    ]
                )
            )
        return responses

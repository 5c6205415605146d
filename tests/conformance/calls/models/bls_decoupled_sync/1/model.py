import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sums the responses of a decoupled model."""

    def execute(self, requests):
        responses = []
        for request in requests:
            total = count = 0
            for response in pb_utils.InferenceRequest(
                model_name="count",
                requested_output_names=["OUT"],
                inputs=[pb_utils.Tensor("N", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())],
            ).exec(decoupled=True):
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                if len(response.output_tensors()) > 0:
                    total += int(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()[0])
                    count += 1
            found = [("SUM", total), ("COUNT", count)]
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([n], np.int32)) for name, n in found])
            )
        return responses

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sums the responses of a decoupled model that is called twice at the same time."""

    async def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            streams = await asyncio.gather(
                *(
                    pb_utils.InferenceRequest(
                        model_name="count", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("N", given)]
                    ).async_exec(decoupled=True)
                    for _ in range(2)
                )
            )
            total = count = 0
            for stream in streams:
                for response in stream:
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

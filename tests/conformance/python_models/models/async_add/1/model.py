"""Responds to all requests of a batch at the same time; a negative number fails the batch."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return list(await asyncio.gather(*(self.one(request) for request in requests)))

    async def one(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        await asyncio.sleep(0.001)
        if given[0, 0] < 0:
            raise ValueError("a negative number")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given + 1)])

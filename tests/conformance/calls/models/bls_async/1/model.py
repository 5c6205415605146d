import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Asks two models at the same time, and returns one output of each."""

    async def execute(self, requests):
        responses = []
        for request in requests:
            pair = [pb_utils.get_input_tensor_by_name(request, each) for each in ("INPUT0", "INPUT1")]
            calls = [
                pb_utils.InferenceRequest(
                    model_name=name, requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=pair
                ).async_exec()
                for name in ("add_sub", "add_sub")
            ]
            first, second = await asyncio.gather(*calls)
            for each in (first, second):
                if each.has_error():
                    raise pb_utils.TritonModelException(each.error().message())
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.get_output_tensor_by_name(first, "OUTPUT0"),
                        pb_utils.get_output_tensor_by_name(second, "OUTPUT1"),
                    ]
                )
            )
        return responses

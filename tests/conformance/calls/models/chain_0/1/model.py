import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Calls the next model of a chain, and adds one to what that returns."""

    def initialize(self, args):
        number = int(args["model_name"].rsplit("_", 1)[1])
        self.callee = f"chain_{number - 1}" if number else None

    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN")
            if self.callee is not None:
                inner = pb_utils.InferenceRequest(
                    model_name=self.callee, requested_output_names=["OUT"], inputs=[given]
                ).exec()
                if inner.has_error():
                    responses.append(pb_utils.InferenceResponse(error=inner.error()))
                    continue
                given = pb_utils.get_output_tensor_by_name(inner, "OUT")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given.as_numpy() + 1)]))
        return responses

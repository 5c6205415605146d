import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The sum of the inputs of a sequence."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            number, value = request.correlation_id(), pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sums[number] = value * 0
            self.sums[number] = self.sums[number] + value
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.sums[number])]))
        return responses

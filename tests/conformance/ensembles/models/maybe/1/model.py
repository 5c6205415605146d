import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUT is IN + MORE if there is MORE; REST is left out for a first element of 7, and both for 8."""

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            more = pb_utils.get_input_tensor_by_name(request, "MORE")
            outputs = [pb_utils.Tensor("OUT", value if more is None else value + more.as_numpy())]
            if value[0] != 7:
                outputs.append(pb_utils.Tensor("REST", value * 10))
            responses.append(pb_utils.InferenceResponse([] if value[0] == 8 else outputs))
        return responses

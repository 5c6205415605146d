import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns its input and no parameters; a request without responses from `execute` responds with its sender."""

    def execute(self, requests):
        for request in requests:
            tensor = pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Passes the responses of a decoupled model on, one by one."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for response in pb_utils.InferenceRequest(
                model_name="count", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("N", given)]
            ).exec(decoupled=True):
                if response.has_error():
                    sender.send(pb_utils.InferenceResponse(error=response.error()))
                elif response.output_tensors():
                    sender.send(pb_utils.InferenceResponse(response.output_tensors()))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return

"""Says by itself what its inputs and outputs are, and that it batches."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        given = auto_complete_model_config.as_dict()
        known = {tensor["name"] for tensor in [*given["input"], *given["output"]]}
        for name in ("INPUT0", "INPUT1"):
            if name not in known:
                auto_complete_model_config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        for name in ("OUTPUT0", "OUTPUT1"):
            if name not in known:
                auto_complete_model_config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        auto_complete_model_config.set_max_batch_size(3)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            outputs = [pb_utils.Tensor("OUTPUT0", left + right), pb_utils.Tensor("OUTPUT1", left - right)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Fails as it is asked to."""

    def execute(self, requests):
        responses = []
        for request in requests:
            kind = pb_utils.get_input_tensor_by_name(request, "KIND").as_numpy()[0].decode()
            if kind == "raise":
                raise ValueError("the model raised")
            if kind == "few":
                return []
            if kind == "number":
                return [7 for _ in requests]
            if kind == "text":
                return "responses"
            if kind == "wrong output":
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", np.array([b"x"], object))]))
            elif kind == "none":
                responses.append(pb_utils.InferenceResponse([]))
            elif kind == "plain":
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("without a code")))
            elif hasattr(pb_utils.TritonError, kind.upper()):
                code = getattr(pb_utils.TritonError, kind.upper())
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"asked for {kind}", code)))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([kind], object))]))
        return responses

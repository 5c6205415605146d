"""Decodes images (PPM), takes 2x2 pixels from their middle, and normalizes them for a network."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

MEAN = np.array([0.5, 0.25, 0.75], np.float32)
SCALE = np.array([2.0, 4.0, 0.5], np.float32)


def decoded(data):
    kind, width, height, most, pixels = data.split(b"\n", 4)
    if kind != b"P6":
        raise pb_utils.TritonModelException(f"not an image: {kind!r}")
    image = np.frombuffer(pixels, np.uint8).reshape(int(height), int(width), 3)
    return image.astype(np.float32) / float(most)


class TritonPythonModel:
    def initialize(self, args):
        config = pb_utils.get_output_config_by_name(json.loads(args["model_config"]), "PIXELS")
        self.dtype = pb_utils.triton_string_to_numpy(config["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            rows = []
            try:
                for data in pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()[:, 0]:
                    image = decoded(data)
                    top, left = image.shape[0] // 2 - 1, image.shape[1] // 2 - 1
                    cut = (image[top : top + 2, left : left + 2] - MEAN) * SCALE
                    rows.append(cut.transpose(2, 0, 1))
            except pb_utils.TritonModelException as error:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
                continue
            pixels = pb_utils.Tensor("PIXELS", np.stack(rows).astype(self.dtype))
            responses.append(pb_utils.InferenceResponse([pixels]))
        return responses

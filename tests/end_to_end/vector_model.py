"""A Python model for /v1/embeddings, which the tests of OpenAI's clients share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: The first number of a vector is how many characters or token ids its input has.
VECTORS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        [[text]] = pb_utils.get_input_tensor_by_name(request, "openai_request").as_numpy()
        count = len(json.loads(text)["input"])
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("embedding", np.array([[count, count + 0.125]], np.float32)),
            pb_utils.Tensor("num_input_tokens", np.array([[count]], np.int32)),
        ])
"""

VECTORS_CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { }
input [ { name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "embedding" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "num_input_tokens" data_type: TYPE_INT32 dims: [ 1 ] }
]
parameters { key: "naiad.openai_fields" value { string_value: "prompt_token_ids" } }
"""


def write_vectors(repository: Path) -> None:
    """Write the model "vectors"."""
    (repository / "vectors" / "1").mkdir(parents=True)
    (repository / "vectors" / "config.pbtxt").write_text(VECTORS_CONFIG)
    (repository / "vectors" / "1" / "model.py").write_text(VECTORS)

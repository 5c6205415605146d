"""For the tests of authors of Python models: `load_model` runs a model in the process of the test (docs/authoring.md).

from backends.python.testing import load_model

def test_it_doubles() -> None:
    with load_model("models/double") as model:
        assert model.infer({"IN": [1, 2, 3]})["OUT"].tolist() == [2, 4, 6]
"""

from __future__ import annotations

from backends.python.harness.calls import CallInputs
from backends.python.harness.model import ModelInProcess, ModelStream, load_model
from backends.python.harness.responder import ModelResponse
from kernel.errors import ServingError

__all__ = ["CallInputs", "ModelInProcess", "ModelResponse", "ModelStream", "ServingError", "load_model"]

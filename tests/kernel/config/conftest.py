from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.config.autofill import fill_backend, normalise
from kernel.config.gpus import NO_GPUS, UsableGpus
from kernel.config.load import from_pbtxt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.generated.model_config_pb2 import ModelConfig

#: Two inputs and two outputs of 16 floats.
TENSORS = """
input [{ name: "INPUT0" data_type: TYPE_FP32 dims: 16 }, { name: "INPUT1" data_type: TYPE_FP32 dims: 16 }]
output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: 16 }]
"""


@pytest.fixture
def tensors() -> str:
    return TENSORS


@pytest.fixture
def prepared() -> Callable[..., ModelConfig]:
    """Parse the text of a model `m` with a model.py, fill it in and normalise it."""

    def prepare(text: str, *, name: str = "m", gpus: UsableGpus = NO_GPUS) -> ModelConfig:
        config = from_pbtxt(text.encode(), "config.pbtxt")
        fill_backend(config, name, {"model.py": False})
        normalise(config, gpus)
        return config

    return prepare

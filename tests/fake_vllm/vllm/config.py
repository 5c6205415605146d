"""The configuration of an engine."""

import dataclasses


@dataclasses.dataclass
class ModelConfig:
    model: str
    max_model_len: int


@dataclasses.dataclass
class VllmConfig:
    model_config: ModelConfig
    task: str
    notes: str

"""Parameters of sampling, of which the engine here knows some."""

import dataclasses
from typing import Any

import msgspec


@dataclasses.dataclass
class StructuredOutputsParams:
    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Any = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0.0:
            raise ValueError(f"temperature must be non-negative, got {self.temperature}.")

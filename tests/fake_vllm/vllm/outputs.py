"""What an engine gives for a request."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclasses.dataclass
class CompletionOutput:
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None


@dataclasses.dataclass
class RequestOutput:
    prompt: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


@dataclasses.dataclass
class EmbeddingOutput:
    embedding: list[float]


_Output = TypeVar("_Output")


@dataclasses.dataclass
class PoolingRequestOutput(Generic[_Output]):
    outputs: _Output
    prompt_token_ids: list[int]
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    @staticmethod
    def from_base(output: PoolingRequestOutput[EmbeddingOutput]) -> EmbeddingRequestOutput:
        return EmbeddingRequestOutput(output.outputs, output.prompt_token_ids)

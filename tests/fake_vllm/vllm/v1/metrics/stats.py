"""The figures of an engine."""

from __future__ import annotations

import dataclasses


class MultiModalCacheStats:
    pass


class SchedulerStats:
    pass


@dataclasses.dataclass
class FinishedRequestStats:
    e2e_latency: float
    num_prompt_tokens: int
    num_generation_tokens: int


@dataclasses.dataclass
class IterationStats:
    """Of one step of the engine."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    finished_requests: list[FinishedRequestStats] = dataclasses.field(default_factory=list)
    time_to_first_tokens_iter: list[float] = dataclasses.field(default_factory=list)
    inter_token_latencies_iter: list[float] = dataclasses.field(default_factory=list)
    n_params_iter: list[int] = dataclasses.field(default_factory=list)

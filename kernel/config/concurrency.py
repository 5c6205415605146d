"""How many batches an instance of a model executes at the same time (parameter `naiad.concurrency`). Pure.

    parameters { key: "naiad.concurrency" value { string_value: "16" } }

It is for backends that can do so: for Python models with `async def execute`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kernel.errors import BadConfig

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig

CONCURRENCY = "naiad.concurrency"

#: The most batches that an instance may execute at the same time.
MAX_CONCURRENCY = 1024

#: A number as it is written, of at most six digits.
_COUNT = re.compile(r"[0-9]{1,6}", re.ASCII)


def check_concurrency(config: ModelConfig, *, shares_worker: bool) -> None:
    """Raise `BadConfig` for a concurrency that is no number, or that the model cannot have."""
    if CONCURRENCY not in config.parameters:
        return
    text = config.parameters[CONCURRENCY].string_value
    if not _COUNT.fullmatch(text) or not 1 <= int(text) <= MAX_CONCURRENCY:
        raise BadConfig(
            f"parameter '{CONCURRENCY}' of model '{config.name}' must be a number from 1 to {MAX_CONCURRENCY}; found "
            f"'{text}'"
        )
    if int(text) == 1:
        return
    reason = ""
    if config.HasField("sequence_batching"):
        reason = "has sequence_batching, in which an instance executes"
    elif config.HasField("ensemble_scheduling"):
        reason = "is an ensemble; its models have a concurrency of their own, it executes"
    elif shares_worker:
        reason = "shares a worker process with other models (parameter naiad.worker), which executes"
    if reason:
        raise BadConfig(
            f"parameter '{CONCURRENCY}' must be 1: model '{config.name}' {reason} one batch at a time; found '{text}'"
        )

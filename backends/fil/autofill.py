"""Completes the configuration of a model from its file. Triton's FIL backend completes nothing. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.fil.outputs import INPUT, OUTPUT, OutputRule

if TYPE_CHECKING:
    from backends.base import Config
    from backends.fil.forest import ForestSignature
    from backends.fil.settings import FilSettings

#: The rows of a batch that costs about as much as a few requests.
MAX_BATCH_SIZE = 4096


def is_complete(config: Config) -> bool:
    """Return whether the configuration has inputs and outputs. Then nothing is filled in, not even max_batch_size."""
    return bool(config.get("input")) and bool(config.get("output"))


def autofill(config: Config, signature: ForestSignature, settings: FilSettings) -> Config:
    """Return a new configuration with missing batching, inputs and outputs filled in."""
    filled = dict(config)
    filled["max_batch_size"] = size = int(config.get("max_batch_size", 0)) or MAX_BATCH_SIZE
    if size > 1 and not config.keys() & {"sequence_batching", "dynamic_batching"}:
        filled["dynamic_batching"] = {}
    if not config.get("input"):
        filled["input"] = [{"name": INPUT, "data_type": "TYPE_FP32", "dims": [signature.feature_count]}]
    if not config.get("output"):
        width = OutputRule(signature, settings).width
        filled["output"] = [{"name": OUTPUT, "data_type": "TYPE_FP32", "dims": [width]}]
    return filled

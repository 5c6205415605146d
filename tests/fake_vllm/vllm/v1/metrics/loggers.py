"""Who gets the figures of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig


class StatLoggerBase:
    def __init__(self, vllm_config: VllmConfig, engine_index: int) -> None:
        pass


StatLoggerFactory = Callable[[VllmConfig, int], Any]

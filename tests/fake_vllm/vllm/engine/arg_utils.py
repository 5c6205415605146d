"""The arguments of an engine: `model.json`."""

from __future__ import annotations

from typing import Any

from vllm.config import ModelConfig, VllmConfig


class AsyncEngineArgs:
    def __init__(
        self,
        model: str,
        task: str = "generate",
        notes: str = "",
        max_model_len: int = 100,
        disable_log_stats: bool = False,
        enable_lora: bool = False,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
    ) -> None:
        if model == "none":
            raise ValueError("there is no model 'none'")
        self.model = model
        self.task = task
        self.notes = notes
        self.max_model_len = max_model_len
        self.disable_log_stats = disable_log_stats
        self.enable_log_requests = enable_log_requests
        self.aggregate_engine_logging = aggregate_engine_logging

    def create_engine_config(self, usage_context: Any = None) -> VllmConfig:
        return VllmConfig(ModelConfig(self.model, self.max_model_len), self.task, self.notes)

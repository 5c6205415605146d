"""An engine whose tokens are the words of a prompt, again and again.

A prompt that begins with `wait` goes on until it is ended. With a schema, the text is an empty object.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.outputs import CompletionOutput, EmbeddingOutput, Logprob, PoolingRequestOutput, RequestOutput
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams


class AsyncLLM:
    @classmethod
    def from_vllm_config(
        cls, vllm_config: VllmConfig, usage_context: Any = None, stat_loggers: Any = None, **more: bool
    ) -> AsyncLLM:
        return cls(vllm_config, [make(vllm_config, 0) for make in stat_loggers or ()])

    def __init__(self, config: VllmConfig, loggers: list[Any]) -> None:
        self._config = config
        self._loggers = loggers
        self._ended: set[str] = set()

    async def reset_mm_cache(self) -> None:
        pass

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return (self._config.task,)

    async def check_health(self) -> None:
        if Path(self._config.notes + ".ill").exists():
            raise RuntimeError("the engine is ill")

    async def abort(self, request_id: str) -> None:
        self._ended.add(request_id)
        self._note("abort")

    def shutdown(self) -> None:
        self._note("shutdown")

    def _note(self, what: str) -> None:
        if self._config.notes:
            with Path(self._config.notes).open("a") as file:
                file.write(f"{what}\n")

    def _record(self, figures: IterationStats) -> None:
        for logger in self._loggers:
            logger.record(None, figures)

    async def generate(
        self,
        prompt: str | dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        images: list[Any] = []
        if isinstance(prompt, dict):
            prompt, images = prompt["prompt"], prompt["multi_modal_data"]["image"]
        words = [f"{image.width}x{image.height}" for image in images] + prompt.split()
        if lora_request is not None:
            words = [f"{lora_request.lora_int_id}:{lora_request.lora_path}"]
        if sampling_params.structured_outputs is not None:
            words = ["{", "}"]
        waits = words[0] == "wait"
        limit = 2 if sampling_params.structured_outputs is not None else sampling_params.max_tokens or 16
        outputs = [CompletionOutput() for _ in range(sampling_params.n)]
        self._record(IterationStats(num_prompt_tokens=len(words), n_params_iter=[sampling_params.n]))
        step = 0
        while request_id not in self._ended and (waits or step < limit):
            await asyncio.sleep(0.001 if waits else 0)
            text = " " + words[step % len(words)]
            step += 1
            for output in outputs:
                self._add(output, text, step, sampling_params.logprobs)
                output.finish_reason = "length" if step == limit and not waits else None
            finished = step == limit and not waits
            self._record(
                IterationStats(
                    num_generation_tokens=len(outputs),
                    finished_requests=[FinishedRequestStats(0.5, len(words), step)] if finished else [],
                    time_to_first_tokens_iter=[0.01] if step == 1 else [],
                    inter_token_latencies_iter=[0.02] if step > 1 else [],
                )
            )
            yield RequestOutput(prompt, list(range(len(words))), outputs, finished)

    @staticmethod
    def _add(output: CompletionOutput, text: str, step: int, logprobs: int | None) -> None:
        output.text += text
        output.token_ids.append(step)
        if logprobs is not None:
            candidates = {
                1000 + rank: Logprob(-0.5 * rank, rank + 1, f"{text}{rank or ''}") for rank in range(logprobs)
            }
            output.logprobs = [*(output.logprobs or ()), candidates or {1000: Logprob(-0.5, 1, text)}]

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str
    ) -> AsyncIterator[PoolingRequestOutput[EmbeddingOutput]]:
        tokens = prompt["prompt_token_ids"] if isinstance(prompt, dict) else list(map(len, prompt.split()))
        vector = [0.5 * token for token in tokens][: pooling_params.dimensions or None]
        yield PoolingRequestOutput(EmbeddingOutput(vector), tokens)

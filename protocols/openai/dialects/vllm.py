"""The dialect of NVIDIA's backend for vLLM: the prompt, and one JSON object with the parameters of sampling. Pure.

Names are those of vLLM's `SamplingParams`. The backend has the same inputs for all its models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.config.spec import TensorSpec  # noqa: TC001 - msgspec reads it
from protocols.openai.dialects.dialect import TEXT_INPUT, switch_tensor, texts_tensor
from protocols.openai.dialects.pieces import TEXT_OUTPUT

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from shm.tensor import Tensor

PARAMETERS_INPUT = "sampling_parameters"

#: Fields that vLLM has by the same name.
_SAMPLING = (
    "allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos", "logit_bias", "max_tokens", "min_p",
    "min_tokens", "presence_penalty", "repetition_penalty", "seed", "skip_special_tokens", "stop", "stop_token_ids",
    "temperature", "top_k", "top_p",
)  # fmt: skip

#: vLLM's way to make a text that fits: of `response_format` and of its own field.
_STRUCTURED = "structured_outputs"

#: What responses are to have, where the model has the switch for it.
_SWITCHES = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")

_encoder = msgspec.json.Encoder()


class VllmDialect(msgspec.Struct, frozen=True):
    """A `Dialect`."""

    model: str
    specs: dict[str, TensorSpec]
    output: str = TEXT_OUTPUT
    ready: bool = False
    chats: bool = False
    honoured: frozenset[str] = frozenset((*_SAMPLING, _STRUCTURED))
    reason: str = "is one of vLLM's backend, which does not take it"

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        specs = self.specs
        parameters = {name: fields[name] for name in _SAMPLING if name in fields}
        if _STRUCTURED in fields:  # the backend decodes it by itself
            parameters[_STRUCTURED] = _encoder.encode(fields[_STRUCTURED]).decode()
        tensors = [
            texts_tensor(specs[TEXT_INPUT], [fields["prompt"]]),
            texts_tensor(specs[PARAMETERS_INPUT], [_encoder.encode(parameters)]),
        ]
        if "stream" in specs:
            tensors.append(switch_tensor(specs["stream"], on=fields.get("stream", False)))
        if "exclude_input_in_output" in specs:  # the server repeats the prompt for `echo`
            tensors.append(switch_tensor(specs["exclude_input_in_output"], on=True))
        tensors += [switch_tensor(specs[name], on=True) for name in _SWITCHES if name in specs]
        return tensors


def vllm_dialect(spec: ModelSpec) -> VllmDialect | None:
    """Return the dialect of a model; None if it has another one, or none."""
    if TEXT_INPUT not in spec.inputs or PARAMETERS_INPUT not in spec.inputs or TEXT_OUTPUT not in spec.outputs:
        return None
    if set(spec.required_inputs) - {TEXT_INPUT, PARAMETERS_INPUT}:
        return None
    return VllmDialect(spec.name, spec.inputs)

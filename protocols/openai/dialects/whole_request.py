"""Our dialect, for Python models: the input `openai_request` is the whole request as JSON, after the checks. Pure.

The model responds with `text_output`, any number of times if it is decoupled, or with `openai_response`: chunks and
bodies that it has made itself. Beside text it may have the outputs `finish_reason`, `num_input_tokens` and
`num_output_tokens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.config.openai_fields import OPENAI_FIELDS, declared_fields
from kernel.config.spec import TensorSpec  # noqa: TC001 - msgspec reads it
from protocols.openai.dialects.dialect import texts_tensor
from protocols.openai.dialects.pieces import READY_OUTPUT, TEXT_OUTPUT

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from shm.tensor import Tensor

REQUEST_INPUT = "openai_request"

#: Fields about how text is sampled: every model of this dialect gets them.
SAMPLING_FIELDS = frozenset(("frequency_penalty", "presence_penalty", "seed", "temperature", "top_p"))

#: What can be in a response only if the model makes it itself.
_ONLY_READY = frozenset(
    ("audio", "function_call", "functions", "logprobs", "modalities", "parallel_tool_calls", "tool_choice", "tools",
     "top_logprobs")
)  # fmt: skip

_encoder = msgspec.json.Encoder()


class WholeRequest(msgspec.Struct, frozen=True):
    """A `Dialect`."""

    model: str
    ready: bool
    honoured: frozenset[str]
    request: TensorSpec
    chats: bool = True
    reason: str = "does not say that it honours it (naiad.openai_fields)"

    @property
    def output(self) -> str:
        return READY_OUTPUT if self.ready else TEXT_OUTPUT

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        return [texts_tensor(self.request, [_encoder.encode(fields)])]


def whole_request(spec: ModelSpec) -> WholeRequest | None:
    """Return the dialect of a model; None if it has another one, or none."""
    if REQUEST_INPUT not in spec.inputs or spec.required_inputs not in ((), (REQUEST_INPUT,)):
        return None
    ready, text = spec.outputs.get(READY_OUTPUT), spec.outputs.get(TEXT_OUTPUT)
    output = ready or text
    if output is None or output.datatype != "BYTES" or spec.inputs[REQUEST_INPUT].datatype != "BYTES":
        return None
    declared = declared_fields(spec.parameters.get(OPENAI_FIELDS, ""), spec.name)
    honoured = SAMPLING_FIELDS | (declared if ready is not None else declared - _ONLY_READY)
    return WholeRequest(spec.name, ready is not None, honoured, spec.inputs[REQUEST_INPUT])

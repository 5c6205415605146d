"""The dialect of TensorRT-LLM's backend: an input for each field. Pure.

Its newer API has the same inputs behind the prefix `sampling_param_`. A field whose input the model does not declare is
refused. Only what the client has given is sent: the backend changes its way of sampling where `top_p` is there.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.config.spec import TensorSpec  # noqa: TC001 - msgspec reads it
from protocols.openai.dialects.dialect import TEXT_INPUT, input_shape, switch_tensor, texts_tensor
from protocols.openai.dialects.pieces import TEXT_OUTPUT
from protocols.openai.errors import ApiError
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.config.spec import ModelSpec

#: The prefix of the newer API.
PREFIX = "sampling_param_"

#: Field → its input, without the prefix.
_NUMBERS = {
    name: name
    for name in (
        "frequency_penalty", "max_tokens", "min_p", "min_tokens", "presence_penalty", "repetition_penalty", "seed",
        "temperature", "top_k", "top_p",
    )
}  # fmt: skip
_SWITCHES = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
_STREAM = ("stream", "streaming")
_EXCLUDE = ("exclude_input_in_output", "exclude_input_from_output")
_STOP = "stop_words"

_FORMATS = {
    "FP32": "<f", "FP64": "<d", "INT8": "<b", "INT16": "<h", "INT32": "<i", "INT64": "<q", "UINT8": "<B",
    "UINT16": "<H", "UINT32": "<I", "UINT64": "<Q",
}  # fmt: skip


class InputEach(msgspec.Struct, frozen=True):
    """A `Dialect`."""

    model: str
    #: Names without the prefix.
    specs: dict[str, TensorSpec]
    honoured: frozenset[str]
    output: str = TEXT_OUTPUT
    ready: bool = False
    chats: bool = False
    reason: str = "has no input for it"

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        specs = self.specs
        tensors = [texts_tensor(specs[TEXT_INPUT], [fields["prompt"]])]
        tensors += [
            _number(specs[name], fields[field], field)
            for field, name in _NUMBERS.items()
            if field in fields and name in specs
        ]
        if _STOP in specs and "stop" in fields:
            tensors.append(texts_tensor(specs[_STOP], fields["stop"]))
        for name in _STREAM:
            if name in specs:
                tensors.append(switch_tensor(specs[name], on=fields.get("stream", False)))
        for name in _EXCLUDE:  # the server repeats the prompt for `echo`
            if name in specs:
                tensors.append(switch_tensor(specs[name], on=True))
        return tensors + [switch_tensor(specs[name], on=True) for name in _SWITCHES if name in specs]


def _number(spec: TensorSpec, value: float, field: str) -> Tensor:
    if spec.datatype not in _FORMATS:
        raise ApiError(f"the model's input '{spec.name}' is {spec.datatype}, expected a number", param=field)
    form = _FORMATS[spec.datatype]
    if spec.datatype == "UINT64" and value < 0:
        value += 1 << 64  # a seed: any 64 bits
    try:
        data = struct.pack(form, value if form[1] in "fd" else int(value))
    except (struct.error, OverflowError):
        raise ApiError(f"{value} is not in the range of the model's input '{spec.name}' ({spec.datatype})", 422,
                       param=field, kind="out_of_range") from None  # fmt: skip
    return Tensor(spec.name, spec.datatype, input_shape(spec), data)


def input_each(spec: ModelSpec) -> InputEach | None:
    """Return the dialect of a model; None if it has another one, or none."""
    specs = _without_prefix(spec.inputs)
    if TEXT_INPUT not in specs or "max_tokens" not in specs or TEXT_OUTPUT not in spec.outputs:
        return None
    known = {TEXT_INPUT, *_NUMBERS.values(), _STOP, *_STREAM, *_EXCLUDE, *_SWITCHES}
    if any(name.removeprefix(PREFIX) not in known for name in spec.required_inputs):
        return None
    return InputEach(spec.name, specs, frozenset(field for field, name in _NUMBERS.items() if name in specs))


def _without_prefix(inputs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in inputs.items()}

"""First requests to try with a model, as lines for a shell. Pure."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.config.spec import ModelSpec, TensorSpec

#: Tensors with more elements are not written out.
MAX_ELEMENTS = 24

#: The size that stands for a variable dimension.
_VARIABLE = 3


class ExampleInput(msgspec.Struct, frozen=True):
    """An input of a request in JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


def example_inputs(spec: ModelSpec) -> list[ExampleInput] | None:
    """Return inputs that a model with `spec` accepts, with small numbers; None if one is too large to write out."""
    found = [
        _example(tensor, batched=spec.max_batch_size > 0) for tensor in spec.inputs.values() if not tensor.optional
    ]
    return None if any(len(each.data) > MAX_ELEMENTS for each in found) else found


def _example(tensor: TensorSpec, *, batched: bool) -> ExampleInput:
    shape = [_VARIABLE if dim == -1 else dim for dim in tensor.dims]
    count = 1
    for dim in shape:
        count *= dim
    numbers = range(1, min(count, MAX_ELEMENTS + 1) + 1)
    return ExampleInput(
        tensor.name, tensor.datatype, [1, *shape] if batched else shape, [*map(_values(tensor), numbers)]
    )


def _values(tensor: TensorSpec) -> Any:
    if tensor.datatype == "BYTES":
        return lambda number: f"text {number}"
    if tensor.datatype == "BOOL":
        return lambda number: bool(number % 2)
    return lambda number: number


def example_lines(spec: ModelSpec, http_url: str, command: str) -> list[str]:
    """Return the lines to try: one with our client, and one with curl unless a tensor is too large for a line.

    `http_url` is the server's; `command` is what starts this program in the author's shell. The lines are right for any
    shell.
    """
    url = "" if http_url == "http://localhost:8000" else f" -u {http_url}"
    inputs = example_inputs(spec)
    if inputs is None:
        names = " ".join(f"{name}=@{name.lower()}.npy" for name in spec.required_inputs)
        return [f"{command} infer {shlex.quote(spec.name)}{url} {names}"]
    given = " ".join(shlex.quote(f"{each.name}={_json(each.data)}") for each in inputs)
    body = {"inputs": [msgspec.to_builtins(each) for each in inputs]}
    path = "generate_stream" if spec.decoupled else "infer"
    if spec.decoupled:
        body = {each.name: each.data if len(each.data) > 1 else each.data[0] for each in inputs}
    return [
        f"{command} infer {shlex.quote(spec.name)}{url} {given}".rstrip(),
        f"curl -s {shlex.quote(f'{http_url}/v2/models/{spec.name}/{path}')} -d {shlex.quote(_json(body))}",
    ]


def _json(value: Sequence[Any] | dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))

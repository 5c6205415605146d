"""First requests for the models of a server, ready to be typed: printed at the end of a start with few models. Pure.

First requests to try with a model, as lines for a shell. Pure.
"""

from __future__ import annotations

import json
import math
import shlex
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.tools.printing import DEFAULT_URL, program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.config.spec import ModelSpec, TensorSpec

#: With more models no requests are printed.
MAX_MODELS = 3

#: An input with more elements is too long to be typed: it gets random numbers.
_MAX_ELEMENTS = 16

#: A row of a table has more elements, which JSON still carries in a line or two.
_MAX_JSON_ELEMENTS = 64

#: Datatypes that JSON does not carry (Triton).
_NOT_IN_JSON = frozenset({"FP16", "BF16"})


def first_requests(specs: Sequence[ModelSpec], url: str, openai_url: str = "") -> str:
    """Return requests to each model at `url`, as commands for any shell; empty for too many models.

    `openai_url` is where OpenAI's API is, empty without it: models that chat are asked there.
    Models with sequences are left out: their requests belong together.
    """
    shown = [spec for spec in specs if spec.sequence_batching is None]
    if not shown or len(specs) > MAX_MODELS:
        return ""
    elsewhere = "" if url == DEFAULT_URL else f" --url {url}"
    lines: list[str] = []
    for spec in shown:
        if openai_url and "openai_request" in spec.inputs:
            lines.append(_openai(spec, openai_url))
            continue
        inputs = [tensor for tensor in spec.inputs.values() if not tensor.optional]
        lines.append(" ".join([f"    {program()} infer", shlex.quote(spec.name), *map(_argument, inputs)]) + elsewhere)
        body = _json_body(inputs)
        if body is not None and not spec.decoupled:
            target = shlex.quote(f"{url}/v2/models/{spec.name}/infer")
            lines.append(f"    curl -s {target} -d {shlex.quote(body)}")
    return "\nIn another terminal, send a first request:\n\n" + "\n".join(lines) + "\n\nCtrl-C stops the server.\n\n"


def _openai(spec: ModelSpec, url: str) -> str:
    """Return a request to a model that takes those of OpenAI's API."""
    if "embedding" in spec.outputs:
        return f"    curl {url}/v1/embeddings -d {shlex.quote(json.dumps({'model': spec.name, 'input': 'Hello'}))}"
    asked = {"model": spec.name, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    return f"    curl -N {url}/v1/chat/completions -d {shlex.quote(json.dumps(asked))}"


def _argument(tensor: TensorSpec) -> str:
    """Return `NAME=VALUE` for `naiad infer`."""
    shape = _shape(tensor)
    if math.prod(shape) > _MAX_ELEMENTS:
        return shlex.quote(f"{tensor.name}=@random")
    return shlex.quote(f"{tensor.name}={json.dumps(_elements(tensor, shape), separators=(',', ':'))}")


def _json_body(inputs: Sequence[TensorSpec]) -> str | None:
    """Return the JSON of a request; None if it would be too long, or JSON cannot carry it."""
    given: list[dict[str, Any]] = []
    for tensor in inputs:
        shape = _shape(tensor)
        if math.prod(shape) > _MAX_JSON_ELEMENTS or tensor.datatype in _NOT_IN_JSON:
            return None
        data = _elements(tensor, shape)
        given.append({"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": data})
    return json.dumps({"inputs": given}, separators=(",", ":"))


def _shape(tensor: TensorSpec) -> list[int]:
    """Return a small shape that the model accepts: a dimension of any size is 1."""
    return [1 if dim == -1 else dim for dim in tensor.shape]


def _elements(tensor: TensorSpec, shape: list[int]) -> list[Any]:
    count = math.prod(shape)
    if tensor.datatype == "BYTES":
        return ["text"] * count
    if tensor.datatype == "BOOL":
        return [True] * count
    return list(range(1, count + 1))


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

"""First requests to try with a model, as lines for any shell: `naiad run` and `naiad dev` print them. Pure."""

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
    lines: list[str] = []
    for spec in shown:
        if openai_url and "openai_request" in spec.inputs:
            lines.append(_openai(spec, openai_url))
        else:
            lines += request_lines(spec, url, program())
    listed = "".join(f"    {line}\n" for line in lines)
    return "\nIn another terminal, send a first request:\n\n" + listed + "\nCtrl-C stops the server.\n\n"


def _openai(spec: ModelSpec, url: str) -> str:
    """Return a request to a model that takes requests of OpenAI's API."""
    if "embedding" in spec.outputs:
        return f"curl {url}/v1/embeddings -d {shlex.quote(json.dumps({'model': spec.name, 'input': 'Hello'}))}"
    asked = {"model": spec.name, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    return f"curl -N {url}/v1/chat/completions -d {shlex.quote(json.dumps(asked))}"


def request_lines(spec: ModelSpec, url: str, command: str) -> list[str]:
    """Return a line with our client, and one with curl unless JSON cannot carry an input, or it is too long.

    `url` is the server's; `command` is what starts this program in the user's shell.
    """
    inputs = [_example(tensor) for tensor in spec.inputs.values() if not tensor.optional]
    elsewhere = [] if url == DEFAULT_URL else ["--url", url]
    lines = [" ".join([command, "infer", shlex.quote(spec.name), *map(_argument, inputs), *elsewhere])]
    if not any(len(each.data) > _MAX_JSON_ELEMENTS or each.datatype in _NOT_IN_JSON for each in inputs):
        body: dict[str, Any] = {"inputs": [msgspec.structs.asdict(each) for each in inputs]}
        if spec.decoupled:
            body = {each.name: each.data[0] if len(each.data) == 1 else each.data for each in inputs}
        target = f"{url}/v2/models/{spec.name}/{'generate_stream' if spec.decoupled else 'infer'}"
        lines.append(f"curl -s {shlex.quote(target)} -d {shlex.quote(_json(body))}")
    return lines


class _Example(msgspec.Struct, frozen=True):
    """An input of a request in JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any]


def _example(tensor: TensorSpec) -> _Example:
    """Return a small input that the model accepts: a dimension of any size is 1. Of a large one some elements only."""
    shape = [1 if dim == -1 else dim for dim in tensor.shape]
    count = min(math.prod(shape), _MAX_JSON_ELEMENTS + 1)
    same: dict[str, Any] = {"BYTES": "text", "BOOL": True}
    data = [same[tensor.datatype]] * count if tensor.datatype in same else list(range(1, count + 1))
    return _Example(tensor.name, tensor.datatype, shape, data)


def _argument(example: _Example) -> str:
    """Return `NAME=VALUE` for `naiad infer`."""
    return shlex.quote(f"{example.name}={'@random' if len(example.data) > _MAX_ELEMENTS else _json(example.data)}")


def _json(value: list[Any] | dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))

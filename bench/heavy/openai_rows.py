"""The rows over OpenAI's API: what of a chat or of a completion can be long, deep or many, and templates of models.

`write_openai_models` writes the models: `echo` returns its prompt in pieces, `chat` is as models of vLLM's backend are,
with a chat template beside it, and the templates of `grows` and `hangs` do what templates must not.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from bench.heavy import bodies
from bench.heavy.attack import Attack, HeavyRow, HttpRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

_ECHO = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            [text] = pb_utils.get_input_tensor_by_name(request, "openai_request").as_numpy()
            asked = json.loads(text)
            said = asked.get("prompt") or asked["messages"][-1]["content"]
            said = said.encode()
            sender = request.get_response_sender()
            for begin in range(0, len(said), 65536):
                piece = np.array([said[begin : begin + 65536]], np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", piece)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

_ECHO_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "naiad.openai_fields" value { string_value: "response_format" } }
"""

_TOOLS = 'parameters { key: "naiad.tool_parser" value { string_value: "%s" } }\n'

_OK = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        ok = pb_utils.Tensor("text_output", np.array([b"ok"], np.object_))
        return [pb_utils.InferenceResponse([ok]) for _ in requests]
"""

_VLLM_CONFIG = """
backend: "python"
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "image" data_type: TYPE_STRING dims: [ -1 ] optional: true },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

#: What a template may be.
_TEMPLATES = {
    "chat": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
    "grows": "{% set all = namespace(text='a') %}{% for n in range(60) %}"
    "{% set all.text = all.text + all.text %}{% endfor %}{{ all.text }}",
    "hangs": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}


def write_openai_models(root: Path) -> None:
    """Write the models of the rows into a repository."""
    models = {"echo": (_ECHO_CONFIG, _ECHO)}
    models |= {f"echo_{name}": (_ECHO_CONFIG + _TOOLS % name, _ECHO) for name in _CALLS}
    models |= dict.fromkeys(_TEMPLATES, (_VLLM_CONFIG, _OK))
    for name, (config, source) in models.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        (root / name / "1" / "model.py").write_text(source)
        if name in _TEMPLATES:
            (root / name / "chat_template.jinja").write_text(_TEMPLATES[name])


def _row(name: str, path: str, make: Callable[[int], bytes], status: str, text: str = "") -> HeavyRow:
    def build(byte_size: int) -> Attack:
        return Attack([HttpRequest(path, make(byte_size))])

    return HeavyRow(f"openai {name}", "openai", build, status, text)


def _said(content: Any, model: str = "echo", **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **more}).encode()


def _prompted(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"model": "echo", "prompt": prompt, **more}).encode()


def _around(opening: bytes, text: str, closing: bytes) -> bytes:
    return opening + text.encode() + closing


def openai_rows() -> list[HeavyRow]:
    """Return the rows in the order of the report."""
    return [*_texts(), *_parts(), *_templates(), *_tool_texts(), *_schemas()]


def _texts() -> list[HeavyRow]:
    words = "word "
    return [
        _row("a long prompt", _COMPLETIONS, lambda n: _prompted(words * (n // 5)), "200"),
        _row("a long prompt, repeated", _COMPLETIONS, lambda n: _prompted(words * (n // 5), echo=True), "400", "echo"),
        _row("a long message", _CHAT, lambda n: _said(words * (n // 5)), "200"),
        _row("a stop word that nearly comes", _CHAT, lambda n: _said("a" * n, stop=["a" * 255 + "b"]), "200"),
        _row("no JSON", _CHAT, lambda n: b"x" * n, "400", "not valid JSON"),
    ]  # fmt: skip


def _parts() -> list[HeavyRow]:
    def messages(byte_size: int) -> bytes:
        text = bodies.repeated('{"role":"user","content":"a"}', byte_size)[1]
        return _around(b'{"model":"echo","messages":', text, b"}")

    def prompts(byte_size: int) -> bytes:
        return _around(b'{"model":"echo","prompt":', bodies.repeated('"a"', byte_size)[1], b"}")

    def inputs(byte_size: int) -> bytes:
        return _around(b'{"model":"chat","input":', bodies.repeated('"a"', byte_size)[1], b"}")

    def fields(byte_size: int) -> bytes:
        return _around(b"{", bodies.numbered("1", byte_size), b"}")

    def images(byte_size: int) -> bytes:
        url = "data:image/png;base64," + base64.b64encode(bytes(byte_size * 3 // 4 // 64)).decode()
        return _said([{"type": "image_url", "image_url": {"url": url}}] * 64, "chat")

    def many_images(byte_size: int) -> bytes:
        part = '{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}'
        text = bodies.repeated(part, byte_size)[1]
        return _around(b'{"model":"chat","messages":[{"role":"user","content":', text, b"}]}")

    return [
        _row("many messages", _CHAT, messages, "200"),
        _row("many prompts", _COMPLETIONS, prompts, "400", "choices, expected at most"),
        _row("many inputs", _EMBEDDINGS, inputs, "400"),
        _row("many fields", _CHAT, fields, "422", "Field required"),
        _row("64 images", _CHAT, images, "200"),
        _row("many images", _CHAT, many_images, "400", "images"),
    ]


def _templates() -> list[HeavyRow]:
    """Their requests are small: what takes memory and time is the model's own."""
    return [
        _row("a template that grows", _CHAT, lambda n: _said("hello", "grows"), "500", "chat template"),
        _row("a template that hangs", _CHAT, lambda n: _said("hello", "hangs"), "500", "chat template"),
        _row("a template with many messages", _CHAT, lambda n: _many("chat", n), "200"),
    ]  # fmt: skip


def _many(model: str, byte_size: int) -> bytes:
    text = bodies.repeated('{"role":"user","content":"hello, how are you today? I am well."}', byte_size // 16)[1]
    return _around(b'{"model":"' + model.encode() + b'","messages":', text, b"}")


#: The parts of texts in which parsers of tools look for calls.
_CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {',
    "llama3": '{"name": "f", "parameters": {',
    "mistral": '[TOOL_CALLS] [{"name": "f", ',
    "pythonic": "[f(a=",
    "qwen3": "<tool_call><function=f><parameter=a>",
}


def _tool_texts() -> list[HeavyRow]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    def begun(part: str, name: str) -> Callable[[int], bytes]:
        return lambda byte_size: _said(part * (byte_size // len(part) // 4), f"echo_{name}", tools=tools)

    return [_row(f"begun calls, {name}", _CHAT, begun(part, name), "200") for name, part in _CALLS.items()]


def _schemas() -> list[HeavyRow]:
    opening = b'{"model":"echo","messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema",'
    opening += b'"json_schema":{"name":"a","schema":'

    def deep(byte_size: int) -> bytes:
        return _around(opening, bodies.nested('{"properties":', byte_size), b"}}}")

    def wide(byte_size: int) -> bytes:
        members = bodies.numbered('{"type":"string"}', byte_size)
        return _around(opening, f'{{"type":"object","properties":{{{members}}}}}', b"}}}")

    return [
        _row("a deep schema", _CHAT, deep, "400", "not valid JSON"),
        _row("a wide schema", _CHAT, wide, "200"),
    ]

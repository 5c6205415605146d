"""Models that take a prompt chat by the template beside them, with OpenAI's own client against a whole server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import onnx
import openai
import pytest

from bench.server import ServerProcess
from tests.protocols.openai.golden_prompts import word_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Repeats its prompt and the parameters of sampling, as a backend that takes a text.
ECHO = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        [text] = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        [given] = pb_utils.get_input_tensor_by_name(request, "sampling_parameters").as_numpy()
        said = text.decode() + "|" + given.decode()
        if (images := pb_utils.get_input_tensor_by_name(request, "image")) is not None:
            said += "|" + ",".join(image.decode() for image in images.as_numpy())
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([said], object))])
"""

CONFIG = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "image" data_type: TYPE_STRING dims: [ -1 ] optional: true }
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

#: Model → its template.
TEMPLATES = {
    "echo": "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
    "sees": "{% for part in messages[0].content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}",
    "refuses": "{{ raise_exception('not today') }}",
    "hangs": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "grows": "{% set x = 'a' * 900000000 %}{{ (x + 'b') | length }}",
    "computes": "{{ 9**(9**9) }}",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    for name, template in TEMPLATES.items():
        _write_model(repository / name, template)
    _write_model(repository / "plain", None)
    _write_model(repository / "tools", "{{ messages[-1].content }}", "naiad.tool_parser", "hermes")
    _write_model(repository / "no_parser", "{{ messages[-1].content }}{{ tools | length }}")
    _write_encoder(repository / "encoder")
    for name in ("tools", "no_parser"):
        (repository / name / "1" / "model.py").write_text(SAYS)
        with (repository / name / "config.pbtxt").open("a") as config:
            config.write("model_transaction_policy { decoupled: true }")
    word_tokenizer().save(str(repository / "echo" / "tokenizer.json"))
    with ServerProcess(repository, "--openai-port=0") as process:
        yield process


def _write_model(folder: Path, template: str | None, *parameter: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(ECHO)
    more = ""
    if parameter:
        more = f'parameters {{ key: "{parameter[0]}" value {{ string_value: "{parameter[1]}" }} }}'
    (folder / "config.pbtxt").write_text(CONFIG + more)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "model_max_length": 64}))


#: Writes what the last message says, in pieces of five characters.
SAYS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.respond(request, request.get_response_sender())

    def respond(self, request, sender):
        [text] = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        [given] = pb_utils.get_input_tensor_by_name(request, "sampling_parameters").as_numpy()
        text, given = text.decode(), json.loads(given)
        if "structured_outputs" in given:
            schema = json.loads(given["structured_outputs"])
            text = '{"city": "Rome"}' if "properties" in schema.get("json", {}) else json.dumps(schema)
            if schema.get("json", {}).get("type") == "array":
                text = '[{"name": "weather", "parameters": {"city": "Rome"}}]'
        for begin in range(0, len(text), 5):
            piece = np.array([text[begin:begin + 5]], object)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", piece)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def _write_encoder(folder: Path) -> None:
    """Write an ONNX encoder whose vectors are the sum of the token ids, and their number."""
    (folder / "1").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    word_tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 6}))
    (folder / "config.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 8 dynamic_batching { }')
    integers, floats = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    axes = onnx.helper.make_tensor("axes", integers, [1], [1])
    nodes = [
        onnx.helper.make_node("Mul", ["input_ids", "attention_mask"], ["known"]),
        onnx.helper.make_node("ReduceSum", ["known", "axes"], ["total"], keepdims=1),
        onnx.helper.make_node("ReduceSum", ["attention_mask", "axes"], ["count"], keepdims=1),
        onnx.helper.make_node("Concat", ["total", "count"], ["both"], axis=1),
        onnx.helper.make_node("Cast", ["both"], ["sentence_embedding"], to=floats),
    ]
    inputs = [
        onnx.helper.make_tensor_value_info(name, integers, ["n", "tokens"]) for name in ("input_ids", "attention_mask")
    ]
    outputs = [onnx.helper.make_tensor_value_info("sentence_embedding", floats, ["n", 2])]
    graph = onnx.helper.make_graph(nodes, "encoder", inputs, outputs, [axes])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, str(folder / "1" / "model.onnx"))


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.openai_port}/v1", api_key="any", max_retries=0)


def chat(server: ServerProcess, model: str, **more: Any) -> str:
    with client_of(server) as client:
        said = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], **more)
    return said.choices[0].message.content or ""


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.openai_port}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_messages_become_a_prompt(server: ServerProcess) -> None:
    prompt, parameters = chat(server, "echo", temperature=0.5).split("|")
    assert prompt == "user:hi;"  # without <s>, which the tokenizer adds
    assert json.loads(parameters) == {"temperature": 0.5}


def test_a_chat_is_a_stream_too(server: ServerProcess) -> None:
    with client_of(server) as client:
        chunks = client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "hi"}], stream=True, n=2
        )
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert [text.split("|")[0] for text in texts] == ["user:hi;", "user:hi;"]


def test_a_large_conversation_becomes_a_prompt(server: ServerProcess) -> None:
    long = "x" * 3_000_000
    status, body = post(
        server, "/v1/chat/completions", {"model": "echo", "messages": [{"role": "user", "content": long}]}
    )
    assert status == 200, body
    assert body["choices"][0]["message"]["content"].startswith(f"user:{long};|")


def test_a_refusal_of_a_template_is_the_clients_error(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="the chat template refuses the messages: not today"):
        chat(server, "refuses")


def test_a_model_without_a_template_is_no_chat(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="model 'plain' has no chat template: use /v1/completions"):
        chat(server, "plain")
    with client_of(server) as client:
        assert client.completions.create(model="plain", prompt="a").choices[0].text.startswith("a|")


@pytest.mark.slow
def test_templates_that_hang_or_grow_end_only_their_own_requests(server: ServerProcess) -> None:
    with pytest.raises(openai.InternalServerError, match="needs more memory than a helper may have"):
        chat(server, "grows")
    assert chat(server, "echo").startswith("user:hi;")
    for model in ("hangs", "computes"):
        with pytest.raises(openai.InternalServerError, match=f"the chat template or the tokenizer of model '{model}'"):
            chat(server, model)
        with pytest.raises(openai.InternalServerError, match="it is tried again in "):
            chat(server, model)  # refused at once
        assert chat(server, "echo").startswith("user:hi;")


def test_tokenize_and_back(server: ServerProcess) -> None:
    status, found = post(server, "/tokenize", {"model": "echo", "prompt": "hello you", "return_token_strs": True})
    assert (status, found) == (
        200,
        {"count": 3, "max_model_len": 64, "tokens": [1, 3, 4], "token_strs": ["<s>", "hello", "you"]},
    )
    assert post(server, "/detokenize", {"model": "echo", "tokens": [3, 4]}) == (200, {"prompt": "hello you"})
    hi = [{"role": "user", "content": "hi"}]
    status, found = post(server, "/tokenize", {"model": "echo", "messages": hi})
    assert (status, found["tokens"]) == (200, [1, 2])  # one <s>, the template's
    long = "hello " * 60_000
    status, found = post(server, "/tokenize", {"model": "echo", "prompt": long})
    assert (status, found["count"]) == (200, 60_001)


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/tokenize", {"model": "echo"}, 422, "One of the fields 'prompt' and 'messages' is required"),
        ("/tokenize", {"model": "plain", "prompt": "x"}, 400, "model 'plain' has no tokenizer beside it"),
        ("/tokenize", {"model": "refuses", "prompt": "x"}, 400, "the model has no tokenizer.json"),
        ("/tokenize", {"model": "echo", "prompt": "x", "chat_template": "y"}, 400, "'chat_template' is not supported"),
        ("/detokenize", {"model": "echo", "tokens": [77]}, 422, "Token id 77 is not in the vocabulary of 5 tokens"),
        ("/detokenize", {"model": "echo", "tokens": [-1]}, 422, "Input should be a valid integer, not negative"),
        ("/detokenize", {"model": "nope", "tokens": [1]}, 400, "Unknown model: nope"),
    ],
)
def test_wrong_requests_say_what_is_wrong(
    server: ServerProcess, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    found, answer = post(server, path, body)
    assert found == status
    assert text in answer["error"]["message"]


def asking(client: openai.OpenAI, said: str, **more: Any) -> Any:
    more = {"model": "tools", "tools": TOOLS, **more}
    return client.chat.completions.create(messages=[{"role": "user", "content": said}], **more)


def test_calls_of_tools_are_found_in_the_text(server: ServerProcess) -> None:
    with client_of(server) as client:
        [choice] = asking(client, f"Let me see.\n{CALL}\n{CALL}").choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        assert [call.type for call in choice.message.tool_calls] == ["function"] * 2
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Rome"}
        assert len({call.id for call in choice.message.tool_calls}) == 2
        [choice] = asking(client, f"{CALL}\n{CALL}", parallel_tool_calls=False).choices
        assert len(choice.message.tool_calls) == 1
        assert choice.message.content is None
        [choice] = asking(client, "<tool_call>no</tool_call>").choices
        assert (choice.finish_reason, choice.message.content) == ("stop", "<tool_call>no</tool_call>")
        assert choice.message.tool_calls is None
        [choice] = asking(client, CALL, tool_choice="none").choices
        assert (choice.finish_reason, choice.message.content) == ("stop", CALL)


def test_calls_of_tools_come_in_a_stream(server: ServerProcess) -> None:
    with client_of(server) as client:
        names: list[Any] = []
        arguments, content, reasons = ["", ""], "", []
        for chunk in asking(client, f"Hm. {CALL}{CALL}", stream=True):
            [choice] = chunk.choices
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(names)
                    names.append((call.type, call.function.name))
                arguments[call.index] += call.function.arguments
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert (content, names, reasons) == ("Hm.", [("function", "weather")] * 2, ["tool_calls"])
    assert [json.loads(each) for each in arguments] == [{"city": "Rome"}] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason"),
    [({"type": "function", "function": {"name": "weather"}}, "stop"), ("required", "tool_calls")],
)
def test_a_client_may_insist_on_a_call(server: ServerProcess, choice: Any, reason: str, stream: bool) -> None:
    with client_of(server) as client:
        if stream:
            asked = {"model": "no_parser", "tools": TOOLS, "tool_choice": choice}
            with client.chat.completions.stream(messages=[{"role": "user", "content": "x"}], **asked) as events:
                [found] = events.get_final_completion().choices
        else:
            [found] = asking(client, "x", model="no_parser", tool_choice=choice).choices
    assert found.finish_reason == reason
    assert found.message.tool_calls is not None
    assert [call.function.name for call in found.message.tool_calls] == ["weather"]
    assert json.loads(found.message.tool_calls[0].function.arguments) == {"city": "Rome"}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"model": "no_parser"}, "\"auto\" tool choice requires a tool parser, which model 'no_parser' does not name"),
        ({"model": "plain"}, "model 'plain' has no chat template"),
        ({"tools": [], "tool_choice": "required"}, '"required" tool choice requires CreateChatCompletionRequest.tools'),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "Tool 'x' has not been passed in `tools`.",
        ),
        (
            {"tools": [], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "Named tool choice requires CreateChatCompletionRequest.tools to be provided",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(server: ServerProcess, more: dict[str, Any], text: str) -> None:
    with client_of(server) as client, pytest.raises(openai.BadRequestError) as refused:
        asking(client, "x", **more)
    assert text in refused.value.message


def test_a_form_of_the_text_reaches_the_engine(server: ServerProcess) -> None:
    schema = {"name": "n", "schema": TOOLS[0]["function"]["parameters"], "strict": True}
    with client_of(server) as client:
        found = asking(client, "x", tools=[], response_format={"type": "json_schema", "json_schema": schema})
        assert json.loads(found.choices[0].message.content) == {"city": "Rome"}
        found = asking(client, "x", tools=[], response_format={"type": "json_object"})
        assert json.loads(found.choices[0].message.content) == {"json_object": True}


def test_an_encoder_gets_token_ids_of_the_tokenizer_beside_it(server: ServerProcess) -> None:
    with client_of(server) as client:
        assert "encoder" in [model.id for model in client.models.list()]
        for encoding in ("float", "base64"):
            found = client.embeddings.create(
                model="encoder", input=["hello you", "hello", "you you you"], encoding_format=encoding
            )
            if encoding == "float":  # <s> is 1, hello 3, you 4; padding does not count
                assert [each.embedding for each in found.data] == [[8.0, 3.0], [4.0, 2.0], [13.0, 4.0]]
            assert (found.usage.prompt_tokens, found.usage.total_tokens) == (9, 9)
        assert client.embeddings.create(model="encoder", input="you").data[0].embedding == [5.0, 2.0]
        with pytest.raises(openai.BadRequestError, match="an input has 8 tokens, and the model takes at most 6"):
            client.embeddings.create(model="encoder", input="you " * 7)
        with pytest.raises(openai.BadRequestError, match="it is of token ids, and model 'encoder' does not say"):
            client.embeddings.create(model="encoder", input=[1, 2])
        with pytest.raises(openai.BadRequestError, match="'dimensions' is not supported"):
            client.embeddings.create(model="encoder", input="you", dimensions=1)


def seeing(client: openai.OpenAI, url: str) -> str:
    parts: Any = [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {"url": url}}]
    found = client.chat.completions.create(model="sees", messages=[{"role": "user", "content": parts}])
    return found.choices[0].message.content or ""


def test_images_of_messages_reach_the_engine(server: ServerProcess) -> None:
    with client_of(server) as client:
        assert seeing(client, "data:image/png;base64,AAEC") == "What is <image>|{}|AAEC"
        large = "AAEC" * 1_000_000
        assert seeing(client, f"data:image/jpeg;base64,{large}").endswith(large)
        with pytest.raises(openai.BadRequestError, match="the server fetches none"):
            seeing(client, "http://127.0.0.1/x.png")
        with pytest.raises(openai.UnprocessableEntityError, match="Input should be an image in base64"):
            seeing(client, "data:image/png;base64,A-")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_items_of_the_responses_api(server: ServerProcess, stream: bool) -> None:
    tools: Any = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    asked: Any = {"model": "tools", "input": f"Hm. {CALL}", "tools": tools}
    with client_of(server) as client:
        if stream:
            with client.responses.stream(**asked) as events:
                found = events.get_final_response()
        else:
            found = client.responses.create(**asked)
        assert found.output_text == "Hm."
        [call] = [item for item in found.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
        assert client.responses.create(**asked, tool_choice="none").output_text == f"Hm. {CALL}"

"""NVIDIA's backend for vLLM, its files untouched, over an engine whose tokens are words (`tests/fake_vllm`).

The backend is not part of this project: VLLM_BACKEND names a checkout of
https://github.com/triton-inference-server/vllm_backend.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from bench.checkout import ROOT
from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(os.environ.get("VLLM_BACKEND", "/nowhere"))

pytestmark = pytest.mark.skipif(
    not (CHECKOUT / "src" / "model.py").is_file(),
    reason="VLLM_BACKEND names no checkout of https://github.com/triton-inference-server/vllm_backend",
)

CONFIG = 'backend: "vllm" instance_group [ { count: 1 kind: KIND_MODEL } ]\n'
CHATML = ROOT / "tests/protocols/openai/chat_templates/chatml.jinja"

SWITCH = 'parameters { key: "%s" value { string_value: "true" } }\n'


def write_model(folder: Path, engine: dict[str, Any], config: str = CONFIG) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.json").write_text(json.dumps({"model": "words", **engine}))
    return folder


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the engine of the model `ill` writes; it is ill when there is a file of that name with `.ill` behind it."""
    return tmp_path_factory.mktemp("notes") / "notes"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("vllm")
    shutil.copytree(CHECKOUT / "src", folder / "extra" / "vllm")
    models = folder / "models"
    words = write_model(models / "words", {"notes": str(notes)}, CONFIG + SWITCH % "REPORT_CUSTOM_METRICS")
    shutil.copy(CHATML, words / "chat_template.jinja")
    adapted = write_model(models / "adapted", {"enable_lora": True})
    (adapted / "1" / "multi_lora.json").write_text(json.dumps({"doll": "here", "sheep": "there"}))
    write_model(models / "vectors", {"task": "embed"})
    write_model(models / "ill", {"notes": f"{notes}-of-ill"}, CONFIG + SWITCH % "ENABLE_VLLM_HEALTH_CHECK")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests/fake_vllm"), os.environ.get("PYTHONPATH", "")]))
        flags = ("--openai-port=0", "--model-control-mode=explicit", "--load-model=*")
        running = ServerProcess(models, f"--backend-directory={folder / 'extra'}", *flags)
        running.start()
    try:
        yield running
    finally:
        running.stop()
    assert notes.read_text().endswith("shutdown\n")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.openai_port}/v1", api_key="any", max_retries=0) as made:
        yield made


def generate(server: ServerProcess, model: str, body: dict[str, Any], path: str = "generate") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{server.url}/v2/models/{model}/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_generate_takes_parameters_of_sampling(server: ServerProcess) -> None:
    asked = {"text_input": "the sea", "parameters": {"max_tokens": 3, "temperature": 0}}
    status, body = generate(server, "words", asked)
    assert (status, json.loads(body)["text_output"]) == (200, "the sea the sea the")
    status, body = generate(server, "words", {**asked, "exclude_input_in_output": True, "return_finish_reason": True})
    assert (json.loads(body)["text_output"], json.loads(body)["finish_reason"]) == (" the sea the", "length")


def test_generate_stream_sends_each_token(server: ServerProcess) -> None:
    asked = {"text_input": "the sea", "stream": True, "sampling_parameters": '{"max_tokens": 3}'}
    status, body = generate(server, "words", asked, "generate_stream")
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
    assert (status, [event["text_output"] for event in events]) == (200, [" the", " sea", " the"])


def test_errors_are_those_of_the_backend(server: ServerProcess) -> None:
    asked = {"text_input": "a", "parameters": {"lora_name": "doll"}}
    assert "LoRA feature is not enabled." in generate(server, "words", asked)[1]
    found = generate(server, "adapted", {**asked, "parameters": {"lora_name": "none"}})
    assert "LoRA none is not supported, we currently support ['doll', 'sheep']" in found[1]
    found = generate(server, "words", {"text_input": "a", "stream": True, "exclude_input_in_output": False})
    assert "Error generating stream: When streaming" in found[1]
    assert "Model vectors does not support 'generate' request" in generate(server, "vectors", {"text_input": "a"})[1]


def test_an_adapter_is_chosen_by_its_name(server: ServerProcess) -> None:
    asked = {"text_input": "a", "exclude_input_in_output": True, "parameters": {"lora_name": "sheep", "max_tokens": 1}}
    assert json.loads(generate(server, "adapted", asked)[1])["text_output"] == " 2:there"


def test_openais_client_completes_texts(client: openai.OpenAI) -> None:
    found = client.completions.create(model="words", prompt="a b", n=2, max_tokens=3, logprobs=2, echo=True)
    assert [choice.text for choice in found.choices] == ["a b a b a"] * 2
    assert [choice.finish_reason for choice in found.choices] == ["length", "length"]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (2, 6)
    logprobs = found.choices[1].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == ([" a", " b", " a"], [3, 5, 7])
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[1] == {" b": 0.0, " b1": -0.5}
    stream = client.completions.create(model="words", prompt="a b", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == " a b a"


def test_openais_client_chats_by_the_template_and_in_a_form(client: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "a"}]
    found = client.chat.completions.create(model="words", messages=said, max_tokens=2, logprobs=True)
    assert found.choices[0].message.content == " <|im_start|>user a<|im_end|>"
    assert found.choices[0].logprobs is not None
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    found = client.chat.completions.create(model="words", messages=said, response_format=schema)
    assert json.loads(found.choices[0].message.content or "") == {}


def test_openais_client_makes_vectors(client: openai.OpenAI) -> None:
    inputs: list[Any] = ["one three", [[3, 5]]]
    for each in inputs:
        found = client.embeddings.create(model="vectors", input=each)
        assert found.data[0].embedding == [1.5, 2.5]
        assert found.usage.prompt_tokens == 2
    assert client.embeddings.create(model="vectors", input="one three", dimensions=1).data[0].embedding == [1.5]


def test_metrics_are_the_backends(server: ServerProcess, client: openai.OpenAI) -> None:
    def total() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
            lines = page.read().decode().splitlines()
        found = [line for line in lines if line.startswith('vllm:generation_tokens_total{model="words"')]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    before = total()
    client.completions.create(model="words", prompt="a", max_tokens=5)
    wait_for(lambda: total() == before + 5)


def test_a_client_that_leaves_ends_its_request_in_the_engine(server: ServerProcess, notes: Path) -> None:
    body = json.dumps({"model": "words", "prompt": "wait", "stream": True})
    before = notes.read_text() if notes.exists() else ""
    connection = http.client.HTTPConnection("127.0.0.1", server.openai_port)
    connection.request("POST", "/v1/completions", body)
    response = connection.getresponse()
    assert b"wait" in response.readline()
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_for(lambda: notes.exists() and notes.read_text() == before + "abort\n")


def test_a_model_whose_engine_is_ill_is_unloaded(server: ServerProcess, notes: Path) -> None:
    asked = {"text_input": "a", "parameters": {"max_tokens": 1}}
    assert generate(server, "ill", asked)[0] == 200
    Path(f"{notes}-of-ill.ill").touch()
    status, body = generate(server, "ill", asked)
    assert "Model is unavailable due to unhealthy vLLM engine" in body
    assert status == 503

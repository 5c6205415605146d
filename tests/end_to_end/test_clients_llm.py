"""LangChain and LiteLLM against a whole server: `make clients` installs them.

Chats, streams, tools, forms of texts, embeddings, errors, timeouts and clients that leave.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import urllib.request
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from bench.server import ServerProcess, wait_for
from kernel.options import CHAT_DEMO_REPOSITORY
from tests.end_to_end.vector_model import write_vectors

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What these clients warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

SAID = "You said: hello there That is all I know."

#: Calls a tool if there is one and it has not been called, writes JSON if that is asked for, else repeats the text.
TALK = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            [text] = pb_utils.get_input_tensor_by_name(request, "openai_request").as_numpy()
            asked = json.loads(text)
            said = asked["messages"][-1]
            if asked.get("tools") and said["role"] != "tool":
                call = {"name": asked["tools"][0]["function"]["name"], "arguments": {"city": "Paris"}}
                response = f"<tool_call>{json.dumps(call)}</tool_call>"
            elif "response_format" in asked:
                response = json.dumps({"city": "Paris", "people": 2})
            else:
                response = "said " + said["content"]
            sender = request.get_response_sender()
            for begin in range(0, len(response), 7):
                piece = np.array([response[begin : begin + 7].encode()], np.object_)
                sender.send(pb_utils.InferenceResponse([
                    pb_utils.Tensor("text_output", piece),
                    pb_utils.Tensor("num_input_tokens", np.array([4], np.int32)),
                    pb_utils.Tensor("num_output_tokens", np.array([1], np.int32)),
                ]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

TALK_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "num_input_tokens" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_INT32 dims: [ 1 ] }
]
parameters { key: "naiad.tool_parser" value { string_value: "hermes" } }
parameters { key: "naiad.openai_fields" value { string_value: "response_format" } }
"""


class City(pydantic.BaseModel):
    """A city, which a model describes."""

    city: str
    people: int


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(CHAT_DEMO_REPOSITORY / "chat", repository / "chat")
    (repository / "talk" / "1").mkdir(parents=True)
    (repository / "talk" / "config.pbtxt").write_text(TALK_CONFIG)
    (repository / "talk" / "1" / "model.py").write_text(TALK)
    write_vectors(repository)
    with ServerProcess(repository, "--openai-port=0") as running:
        yield running


def base_url(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.openai_port}/v1"


def running(server: ServerProcess) -> int:
    """Return how many requests the model `chat` has that have not ended."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    [line] = [line for line in lines if line.startswith('naiad_inference_in_flight_requests{model="chat"')]
    return int(float(line.rpartition(" ")[2]))


LONG = "word " * 3000  # the model takes more than a minute for it


# ---- LangChain -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def langchain() -> Any:
    return pytest.importorskip("langchain_openai", reason="LangChain is not installed: make clients")


def langchain_chat(langchain: Any, server: ServerProcess, model: str = "chat", **more: Any) -> Any:
    return langchain.ChatOpenAI(model=model, base_url=base_url(server), api_key="any", max_retries=0, **more)


def test_langchain_chats_and_streams(langchain: Any, server: ServerProcess) -> None:
    chat = langchain_chat(langchain, server, temperature=0.5)
    found = chat.invoke("hello there")
    assert found.content == SAID
    assert found.usage_metadata["output_tokens"] == 5
    assert found.response_metadata["finish_reason"] == "stop"
    chunks = list(langchain_chat(langchain, server, stream_usage=True).stream("hello there"))
    assert "".join(chunk.content for chunk in chunks) == SAID
    assert len(chunks) > 3
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 5
    assert [each.content for each in chat.batch(["a", "b"])] == [
        f"You said: {each} That is all I know." for each in "ab"
    ]


def test_langchain_calls_tools_and_goes_on_with_their_results(langchain: Any, server: ServerProcess) -> None:
    messages: Any = importlib.import_module("langchain_core.messages")
    chat = langchain_chat(langchain, server, "talk").bind_tools([WEATHER])
    found = chat.invoke("hello")
    [call] = found.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = messages.ToolMessage("sunny", tool_call_id=call["id"])
    assert chat.invoke([("user", "hello"), found, result]).content == "said sunny"
    whole = None
    for chunk in chat.stream("hello"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [("weather", {"city": "Paris"})]


def test_langchain_gets_objects(langchain: Any, server: ServerProcess) -> None:
    chat = langchain_chat(langchain, server, "talk").with_structured_output(City)
    assert chat.invoke("hello") == City(city="Paris", people=2)


def test_langchain_makes_vectors(langchain: Any, server: ServerProcess) -> None:
    # With the check it sends token ids, of an encoding that it fetches from OpenAI.
    vectors = langchain.OpenAIEmbeddings(
        model="vectors", base_url=base_url(server), api_key="any", check_embedding_ctx_length=False
    )
    assert vectors.embed_documents(["hello", "a"]) == [[5.0, 5.125], [1.0, 1.125]]
    assert vectors.embed_query("hello") == [5.0, 5.125]


def test_langchain_raises_errors_and_timeouts(langchain: Any, server: ServerProcess) -> None:
    openai: Any = importlib.import_module("openai")
    with pytest.raises(openai.BadRequestError, match="Unknown model: none"):
        langchain_chat(langchain, server, "none").invoke("hello")
    with pytest.raises(openai.APITimeoutError):
        langchain_chat(langchain, server, timeout=0.01).invoke("hello")
    wait_for(lambda: running(server) == 0)
    stream = langchain_chat(langchain, server).stream(LONG)
    next(stream)
    assert running(server) == 1
    stream.close()
    wait_for(lambda: running(server) == 0)


# ---- LiteLLM ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litellm(server: ServerProcess) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a list at its import
        return pytest.importorskip("litellm", reason="LiteLLM is not installed: make clients")


@pytest.fixture(params=["openai", "hosted_vllm"])
def asked(request: pytest.FixtureRequest, server: ServerProcess) -> Any:
    """Return what LiteLLM is asked with, by each of its two ways to servers like ours."""

    def arguments(model: str, said: str = "hello there", **more: Any) -> dict[str, Any]:
        return {"model": f"{request.param}/{model}", "messages": [{"role": "user", "content": said}],
                "api_base": base_url(server), "api_key": "any", "max_retries": 0, **more}  # fmt: skip

    return arguments


def test_litellm_chats_and_streams(litellm: Any, asked: Any) -> None:
    found = litellm.completion(**asked("chat", temperature=0.5))
    assert found.choices[0].message.content == SAID
    assert found.usage.completion_tokens == 5
    chunks = list(litellm.completion(**asked("chat", stream=True, stream_options={"include_usage": True})))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [5]


def test_litellm_calls_tools_and_gets_objects(litellm: Any, asked: Any) -> None:
    [call] = litellm.completion(**asked("talk", tools=[WEATHER])).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    chunks = list(litellm.completion(**asked("talk", tools=[WEATHER], stream=True)))
    whole = litellm.stream_chunk_builder(chunks)
    [call] = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    found = litellm.completion(**asked("talk", response_format=City))
    assert City.model_validate_json(found.choices[0].message.content) == City(city="Paris", people=2)


def test_litellm_makes_vectors(litellm: Any, asked: Any) -> None:
    arguments = asked("vectors", input=["hello", "a"])
    del arguments["messages"]
    found = litellm.embedding(**arguments)
    assert [each["embedding"] for each in found.data] == [[5.0, 5.125], [1.0, 1.125]]


def test_litellm_raises_errors_and_timeouts(litellm: Any, asked: Any, server: ServerProcess) -> None:
    # With one of its two ways it takes the code `model_not_found` for more than the status.
    with pytest.raises((litellm.BadRequestError, litellm.NotFoundError), match="Unknown model: none"):
        litellm.completion(**asked("none"))
    with pytest.raises(litellm.Timeout):
        litellm.completion(**asked("chat", timeout=0.01))
    wait_for(lambda: running(server) == 0)

    async def leave() -> None:
        task = asyncio.ensure_future(litellm.acompletion(**asked("chat", LONG)))
        await asyncio.to_thread(wait_for, lambda: running(server) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    wait_for(lambda: running(server) == 0)

"""OpenAI's own client against a whole server, whatever version of it is installed."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import urllib.request
from typing import TYPE_CHECKING, Any

import openai
import pytest

from bench.server import ServerProcess, wait_for
from kernel.options import CHAT_DEMO_REPOSITORY
from tests.end_to_end.vector_model import write_vectors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai.types.chat import ChatCompletionMessageParam

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello there"}]
SAID = "You said: hello there That is all I know."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(CHAT_DEMO_REPOSITORY / "chat", repository / "chat")
    write_vectors(repository)
    with ServerProcess(repository, "--openai-port=0") as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.openai_port}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["chat", "vectors"]
    assert client.models.retrieve("chat").owned_by == "Triton Inference Server"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/none")
    assert caught.value.code == "model_not_found"


def test_a_chat_is_responded_to(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="chat", messages=HELLO, temperature=0.5, seed=1, user="me")
    [choice] = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (2, 5, 7)
    assert found._request_id


def test_the_chunks_of_a_stream_are_the_response_without_one(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="chat", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usages = ["", ""], [], []
    for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [(choice.index, choice.finish_reason)] if choice.finish_reason else []
    assert texts == [SAID, SAID]
    assert sorted(reasons) == [(0, "stop"), (1, "stop")]
    [usage] = usages
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 10)


def test_limits_and_stop_words_are_honoured(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="chat", messages=HELLO, max_completion_tokens=2)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("You said: ", "length")
    found = client.chat.completions.create(model="chat", messages=HELLO, stop=["lo th"])
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("You said: hel", "stop")


def test_completions_of_several_prompts_come_in_order(client: openai.OpenAI) -> None:
    found = client.completions.create(model="chat", prompt=["one", "two"], echo=True, max_tokens=3)
    assert [choice.text for choice in found.choices] == ["oneYou said: one ", "twoYou said: two "]
    streamed = client.completions.create(model="chat", prompt="one", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "You said: one That is all I know."


def test_a_response_is_created_and_continued_by_its_own_items(client: openai.OpenAI) -> None:
    found = client.responses.create(model="chat", input="hello there", instructions="Be kind.", store=False)
    assert (found.output_text, found.status) == (SAID, "completed")
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (2, 5)
    conversation: Any = [{"role": "user", "content": "hello there"}, *found.output, {"role": "user", "content": "more"}]
    assert client.responses.create(model="chat", input=conversation).output_text.startswith("You said: more ")
    cut = client.responses.create(model="chat", input="hello there", max_output_tokens=2)
    assert cut.incomplete_details is not None
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == (
        "You said: ", "incomplete", "max_output_tokens",
    )  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="'previous_response_id' is not supported"):
        client.responses.create(model="chat", input="more", previous_response_id=found.id)


def test_the_events_of_a_response_are_those_that_the_client_joins(client: openai.OpenAI) -> None:
    with client.responses.stream(model="chat", input="hello there") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(deltas) > 1
    assert "".join(deltas) == final.output_text == SAID
    assert final.usage is not None
    assert final.usage.output_tokens == 5


def test_embeddings_come_in_both_forms(client: openai.OpenAI) -> None:
    forms: list[dict[str, Any]] = [{}, {"encoding_format": "float"}]  # the client asks for base64 by itself
    for form in forms:
        found = client.embeddings.create(model="vectors", input=["a", "four"], **form)
        assert [each.embedding for each in found.data] == [[1.0, 1.125], [4.0, 4.125]]
        assert found.usage.prompt_tokens == 5
    with pytest.raises(openai.BadRequestError, match="'dimensions' is not supported"):
        client.embeddings.create(model="vectors", input="a", dimensions=3)


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="chat", messages=HELLO, logit_bias={"1": 1})
    assert (caught.value.param, caught.value.code) == ("logit_bias", "unsupported_parameter")
    assert "'logit_bias' is not supported" in str(caught.value)
    with pytest.raises(openai.UnprocessableEntityError, match="Input should be less than or equal to 2"):
        client.chat.completions.create(model="chat", messages=HELLO, temperature=3)
    with pytest.raises(openai.BadRequestError, match="Unknown model: none"):
        client.chat.completions.create(model="none", messages=HELLO)


def test_a_timeout_of_the_client_is_raised_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="chat", messages=HELLO, timeout=0.01)


def requests_of_chat(server: ServerProcess, *families: str) -> int:
    """Return the sum of the figures of the model `chat` in these families."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    names = tuple(f"{family}{{" for family in families)
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(names) and '"chat"' in line)


def ended(server: ServerProcess) -> int:
    """Return how many requests the model has ended, completely or because they were cancelled."""
    return requests_of_chat(server, "nv_inference_request_success", "nv_inference_request_failure")


def running(server: ServerProcess) -> int:
    return requests_of_chat(server, "naiad_inference_in_flight_requests")


def test_a_stream_that_is_closed_or_cancelled_ends_the_work_of_the_model(server: ServerProcess) -> None:
    words: list[Any] = [{"role": "user", "content": "word " * 3000}]  # more than a minute
    wait_for(lambda: running(server) == 0)  # also those of clients that left
    before = ended(server)

    async def leave() -> None:
        url = f"http://127.0.0.1:{server.openai_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            stream = await client.chat.completions.create(model="chat", messages=words, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            await asyncio.to_thread(wait_for, lambda: running(server) == 0)
            task = asyncio.ensure_future(client.chat.completions.create(model="chat", messages=words))
            await asyncio.to_thread(wait_for, lambda: running(server) == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    wait_for(lambda: ended(server) == before + 2)


def test_many_streams_run_at_the_same_time(server: ServerProcess) -> None:
    async def ask_all() -> list[str]:
        url = f"http://127.0.0.1:{server.openai_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:

            async def ask() -> str:
                stream = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(ask() for _ in range(20))))

    assert asyncio.run(ask_all()) == [SAID] * 20


def test_the_first_request_that_the_server_prints_is_responded_to(server: ServerProcess) -> None:
    server.wait_for_log("curl -N ")
    [line] = [line for line in server.log.splitlines() if "curl -N " in line]
    _, _, url, _, data = shlex.split(line)
    assert json.loads(data)["model"] == "chat"
    with urllib.request.urlopen(urllib.request.Request(url, data.encode())) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")

"""The Responses API: what its requests become, and that OpenAI's own types accept its objects and events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.responses import Response as ResponseType
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from kernel.errors import Unavailable
from kernel.serving.response import Response
from protocols.openai.errors import ApiError
from protocols.openai.fields import RESPONSE_FIELDS, checked
from protocols.openai.responses_api import as_chat
from tests.protocols.openai.door import NOW_S, Door, Script, config, run, talk, text_tensor

if TYPE_CHECKING:
    from kernel.serving.request import Request

RESPONSES = "/v1/responses"
ASKED: dict[str, Any] = {"model": "talk", "input": "hi"}
_events: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def chat_of(**fields: Any) -> dict[str, Any]:
    return as_chat(checked({"model": "talk", "input": "hi", **fields}, RESPONSE_FIELDS)).fields


def events_in(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names and numbers are right and that OpenAI's types accept."""
    found = []
    for number, event in enumerate(body.decode().removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        decoded = json.loads(data.removeprefix("data: "))
        assert name == f"event: {decoded['type']}"
        assert decoded["sequence_number"] == number
        _events.validate_python(decoded)
        found.append(decoded)
    return found


async def stream(door: Door, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with door.session.post(RESPONSES, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        return events_in(await response.read())


def test_a_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    assert chat_of(instructions="Be brief.", max_output_tokens=5, temperature=0)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert chat_of(max_output_tokens=5)["max_completion_tokens"] == 5


def test_items_are_messages_and_calls_that_follow_each_other_are_one() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "1", "output": "nothing"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:x", "detail": "low"}],
        },
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}},
    ]
    assert chat_of(input=items)["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "What is"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}]},
    ]


def test_tools_and_formats_have_the_form_of_a_chat() -> None:
    schema = {"type": "object"}
    found = chat_of(
        tools=[{"type": "function", "name": "look", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "look"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": None},
    )
    assert found["tools"] == [{"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert found["response_format"] == {
        "type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True},
    }  # fmt: skip
    assert (found["verbosity"], found["reasoning_effort"]) == ("low", "low")
    assert "response_format" not in chat_of(text={"format": {"type": "text"}})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"tone": "kind"}}, "text.tone"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["hi"]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type"),
        ({"input": [{"role": "owner", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_has_no_effect_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_of(**fields)
    assert caught.value.param == param


def test_a_response_is_one_body() -> None:
    async def test(door: Door) -> None:
        status, body = await door.post(
            RESPONSES, {**ASKED, "instructions": "Be brief.", "metadata": {"a": "b"}, "store": True, "temperature": 0.5}
        )
        assert status == 200
        ResponseType.model_validate(body, strict=True)
        assert body["id"].startswith("resp_")
        [message] = body["output"]
        assert message["content"] == [
            {"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}
        ]
        assert (body["status"], body["created_at"], body["model"]) == ("completed", NOW_S, "talk")
        assert (body["instructions"], body["metadata"], body["temperature"]) == ("Be brief.", {"a": "b"}, 0.5)
        assert body["store"] is False
        assert body["usage"] is None
        [asked] = model[1].asked
        assert asked["messages"][0] == {"role": "system", "content": "Be brief."}

    model = talk()
    run(test, model)


def test_a_stream_has_the_events_of_one_message() -> None:
    def respond(script: Script, request: Request) -> None:
        for word in ("Hel", "lo"):
            script.send(request, word, num_input_tokens=4, num_output_tokens=1)
        script.send(request, "", finish_reason="length", num_output_tokens=0)
        script.end(request)

    async def test(door: Door) -> None:
        events = await stream(door, {**ASKED, "max_output_tokens": 2})
        assert [each["type"] for each in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
        assert [each["delta"] for each in events if each["type"].endswith("delta")] == ["Hel", "lo"]
        response = events[-1]["response"]
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["input_tokens"] == 4
        assert response["usage"]["output_tokens"] == 2
        assert response["output"][0]["content"][0]["text"] == "Hello"
        assert {each["item_id"] for each in events if "item_id" in each} == {response["output"][0]["id"]}

    run(test, talk(respond))


def test_a_response_without_text_has_an_empty_message() -> None:
    async def test(door: Door) -> None:
        events = await stream(door, ASKED)
        [message] = events[-1]["response"]["output"]
        assert message["content"][0]["text"] == ""
        _, body = await door.post(RESPONSES, ASKED)
        assert body["output"][0]["content"][0]["text"] == ""

    run(test, talk(lambda script, request: script.end(request)))


CHUNKS = [
    {"choices": [{"index": 0, "delta": {"content": "I look."}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "look"}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [
        {"index": 1, "id": "call_2", "function": {"name": "see", "arguments": "{}"}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}},
]  # fmt: skip
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
READY = config(
    "talk",
    ("openai_response",),
    'parameters { key: "naiad.openai_fields" value { string_value: "tools,tool_choice,response_format" } }',
)


def test_calls_of_tools_are_items_of_their_own() -> None:
    def respond(script: Script, request: Request) -> None:
        for chunk in CHUNKS:
            outputs = [text_tensor("openai_response", json.dumps(chunk))]
            request.respond(Response("talk", "1", request.id, outputs=outputs, final=False))
        script.end(request)

    async def test(door: Door) -> None:
        events = await stream(door, {**ASKED, "tools": TOOLS})
        message, look, see = events[-1]["response"]["output"]
        assert message["content"][0]["text"] == "I look."
        assert (look["call_id"], look["name"], look["arguments"]) == ("call_1", "look", '{"a":1}')
        assert (see["call_id"], see["name"], see["arguments"]) == ("call_2", "see", "{}")
        deltas = [each for each in events if each["type"] == "response.function_call_arguments.delta"]
        assert [each["delta"] for each in deltas] == ['{"a"', ":1}", "{}"]
        assert [each["output_index"] for each in deltas] == [1, 1, 2]
        assert events[-1]["response"]["usage"]["total_tokens"] == 14
        [asked] = model[1].asked
        assert asked["tools"][0]["function"]["name"] == "look"
        assert asked["stream_options"] == {"include_usage": True}

    model = (READY, Script(respond))
    run(test, model)


def test_calls_of_tools_in_a_whole_body_are_items() -> None:
    message = {
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    }
    made = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}

    def respond(script: Script, request: Request) -> None:
        request.respond(Response("talk", "1", request.id, outputs=[text_tensor("openai_response", json.dumps(made))]))

    async def test(door: Door) -> None:
        status, body = await door.post(RESPONSES, {**ASKED, "tools": TOOLS})
        assert status == 200
        ResponseType.model_validate(body, strict=True)
        [call] = body["output"]
        assert (call["type"], call["call_id"], call["name"], call["arguments"]) == (
            "function_call", "call_1", "look", "{}",
        )  # fmt: skip

    run(test, (READY, Script(respond)))


@pytest.mark.parametrize("made", ["{", '{"choices": [{"delta": {"content": 3}}]}', '{"choices": 1}'])
def test_what_is_no_chunk_of_a_chat_is_an_error(made: str) -> None:
    def respond(script: Script, request: Request) -> None:
        outputs = [text_tensor("openai_response", made)]
        request.respond(Response("talk", "1", request.id, outputs=outputs, final=False))

    async def test(door: Door) -> None:
        status, body = await door.post(RESPONSES, {**ASKED, "stream": True})
        assert status == 500
        assert "the model's output 'openai_response' is" in body["error"]["message"]

    run(test, (READY, Script(respond)))


def test_a_stream_that_fails_ends_with_one_event() -> None:
    def respond(script: Script, request: Request) -> None:
        script.send(request, "some")

    async def test(door: Door) -> None:
        async with door.session.post(RESPONSES, json={**ASKED, "stream": True}) as response:
            begun = await response.content.readuntil(b"\n\n")
            [request] = model[1].requests
            model[1].end(request, Unavailable("the worker has died"))
            events = events_in(begun + await response.read())
        assert [each["type"] for each in events].count("response.failed") == 1
        assert events[-1]["response"]["error"] == {"code": "server_error", "message": "the worker has died"}
        assert events[-1]["response"]["status"] == "failed"

    model = talk(respond)
    run(test, model)


def test_what_the_model_does_not_take_is_refused_by_the_name_that_the_client_used() -> None:
    async def test(door: Door) -> None:
        for field, value, param in (
            ("text", {"format": {"type": "json_object"}}, "text.format"),
            ("reasoning", {"effort": "high"}, "reasoning.effort"),
            ("tools", TOOLS, "tools"),
            ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}],
             "input.0.content.0"),
        ):  # fmt: skip
            status, body = await door.post(RESPONSES, {**ASKED, "instructions": "Be brief.", field: value})
            assert (status, body["error"]["param"]) == (400, param)

    run(test, talk())


def test_texts_of_a_stream_count_in_the_budget_until_its_end() -> None:
    def respond(script: Script, request: Request) -> None:
        script.send(request, "x" * 5000)

    async def test(door: Door) -> None:
        async with door.session.post(RESPONSES, json={**ASKED, "stream": True}) as response:
            while b"x" * 5000 not in await response.content.readuntil(b"\n\n"):
                pass
            assert door.lab.kernel.budget.used_byte_size >= 5000
            [request] = model[1].requests
            model[1].end(request)
            await response.read()

    model = talk(respond)
    run(test, model)

"""Long texts are taken and sent in parts, so that no piece of work on the event loop is long; and what is malformed
within a request is the client's error."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from protocols.openai.pieces import PART_BYTE_SIZE, Piece
from protocols.openai.plans import Api, GenerationPlan
from protocols.openai.response_requests import as_chat
from protocols.openai.responses import Identity, TextBody, TextEvents
from protocols.openai.responses_api import ResponseBody, ResponseEvents
from tests.protocols.openai.door import ASKED, CHAT, Door, Script, run, talk

if TYPE_CHECKING:
    from kernel.serving.request import Request

RESPONSES = "/v1/responses"

#: Its characters have two bytes, and each part begins within one.
LONG = "a" + "é" * (5 * PART_BYTE_SIZE // 2)

FORMS = pytest.mark.parametrize("at_once", [True, False], ids=["last", "followed"])


def says(text: str, *, at_once: bool) -> Any:
    """Return the script of a model that sends a text in one response, which may be the last one."""

    def respond(script: Script, request: Request) -> None:
        script.send(request, text, num_output_tokens=7, num_input_tokens=3)
        if at_once:
            script.end(request)
        else:
            script.send(request, "!")
            script.end(request)

    return respond


def chunks_of(events: list[Any]) -> list[str]:
    return [each["choices"][0]["delta"].get("content") or "" for each in events[:-1] if each["choices"]]


@FORMS
def test_a_long_response_of_a_model_becomes_several_chunks(at_once: bool) -> None:
    async def test(door: Door) -> None:
        events = await door.stream(CHAT, {**ASKED, "stream_options": {"include_usage": True}})
        chunks = chunks_of(events)
        assert "".join(chunks) == LONG + ("" if at_once else "!")
        assert max(len(each.encode()) for each in chunks) <= PART_BYTE_SIZE + 2
        assert events[-2]["usage"]["completion_tokens"] == 7
        _, body = await door.post(CHAT, ASKED)
        assert body["choices"][0]["message"]["content"] == "".join(chunks)
        assert body["usage"]["prompt_tokens"] == 3

    run(test, talk(says(LONG, at_once=at_once)))


@FORMS
def test_a_stop_word_is_found_over_the_end_of_a_part(at_once: bool) -> None:
    before = "b" * (PART_BYTE_SIZE - 2)

    async def test(door: Door) -> None:
        asked = {**ASKED, "stop": ["stop"]}
        assert "".join(chunks_of(await door.stream(CHAT, asked))) == before
        _, body = await door.post(CHAT, asked)
        assert body["choices"][0]["message"]["content"] == before
        assert body["choices"][0]["finish_reason"] == "stop"

    run(test, talk(says(before + "stop" + LONG, at_once=at_once)))


@FORMS
def test_calls_of_tools_are_found_in_a_long_text(at_once: bool) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": "%s"}}</tool_call>' % ("y" * PART_BYTE_SIZE)
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def test(door: Door) -> None:
        _, body = await door.post(CHAT, {**ASKED, "tools": tools})
        message = body["choices"][0]["message"]
        assert message["content"].startswith(LONG)
        [found] = message["tool_calls"]
        assert json.loads(found["function"]["arguments"]) == {"x": "y" * PART_BYTE_SIZE}

    more = 'parameters { key: "naiad.tool_parser" value { string_value: "hermes" } }'
    run(test, talk(says(LONG + call, at_once=at_once), more=more))


@FORMS
def test_a_long_text_of_the_responses_api_is_whole(at_once: bool) -> None:
    said = LONG + ("" if at_once else "!")

    async def test(door: Door) -> None:
        asked = {"model": "talk", "input": "hi"}
        status, body = await door.post(RESPONSES, asked)
        assert status == 200
        assert [part["text"] for part in body["output"][0]["content"]] == [said]
        async with door.session.post(RESPONSES, json={**asked, "stream": True}) as response:
            events = [
                json.loads(each.partition(b"data: ")[2]) for each in (await response.read()).split(b"\n\n") if each
            ]
        assert "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta") == said
        assert [each["text"] for each in events if each["type"] == "response.output_text.done"] == [said]
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == said
        assert [each["sequence_number"] for each in events] == list(range(len(events)))

    run(test, talk(says(LONG, at_once=at_once)))


# ---- nothing long is made in one piece ----------------------------------------------------------


def response_plan() -> GenerationPlan:
    repeated = as_chat({"model": "talk", "input": "hi"}).repeated
    return GenerationPlan(Api.RESPONSES, "talk", stream=True, repeated=repeated)


IDENTITY = Identity("resp_1", 1, "talk")


def test_the_last_events_of_a_long_response_come_in_parts() -> None:
    plan = response_plan()
    events = ResponseEvents(TextEvents(plan, IDENTITY), plan, IDENTITY)
    for _ in range(100):
        events.add(0, Piece(b"x" * PART_BYTE_SIZE))
        while events.has_more:
            assert len(events.take()) < 200_000
    events.end(0)
    events.end_stream()
    sizes = [len(events.take())]
    while events.has_more:
        sizes.append(len(events.take()))
    assert sum(sizes) > 4 * 100 * PART_BYTE_SIZE, "the text is in four events"
    assert max(sizes) < 200_000


def test_the_body_of_a_long_response_has_parts() -> None:
    plan = response_plan()
    for body in (ResponseBody(TextBody(plan, IDENTITY), plan, IDENTITY), TextBody(plan, IDENTITY)):
        for _ in range(100_000):
            body.add(0, Piece(b"word "))
        body.end(0)
        parts = body.parts()
        assert max(map(len, parts)) < 70_000
        assert len(parts) < 50, "small texts are joined while they come"
        json.loads(b"".join(parts))


# ---- what clients may write ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [[], {}, 1, True, None, ["text"]])
def test_a_part_of_a_message_with_another_type_is_the_clients_error(value: Any) -> None:
    async def test(door: Door) -> None:
        content = [{"type": value, "text": "a"}]
        status, body = await door.post(CHAT, {"model": "talk", "messages": [{"role": "user", "content": content}]})
        assert (status, body["error"]["param"]) == (422, "messages.0.content.0.type")
        status, _ = await door.post(RESPONSES, {"model": "talk", "input": [{"role": "user", "content": content}]})
        assert status == 422

    run(test, talk())


@pytest.mark.parametrize("value", [[], {}, 1])
def test_other_values_in_place_of_words_are_the_clients_error(value: Any) -> None:
    async def test(door: Door) -> None:
        for asked in (
            {**ASKED, "messages": [{"role": value, "content": "a"}]},
            {**ASKED, "tool_choice": value, "tools": [{"type": "function", "function": {"name": "f"}}]},
            {**ASKED, "tools": [{"type": value, "function": {"name": "f"}}]},
            {**ASKED, "response_format": {"type": value}},
        ):
            status, body = await door.post(CHAT, asked)
            assert 400 <= status < 500, (asked, body)
        for more in (
            {"input": [{"type": value, "role": "user", "content": "a"}]},
            {"input": "a", "tool_choice": value},
            {"input": "a", "text": {"format": {"type": value}}},
            {"input": "a", "include": [value]},
        ):
            status, body = await door.post(RESPONSES, {"model": "talk", **more})
            assert 400 <= status < 500, (more, body)

    more = (
        'parameters { key: "naiad.tool_parser" value { string_value: "hermes" } }'
        'parameters { key: "naiad.openai_fields" value { string_value: "response_format" } }'
    )
    run(test, talk(more=more))


def test_the_stop_words_of_a_thousand_choices_take_no_time_before_their_texts_come() -> None:
    words = [f"{number:0256}" for number in range(16)]
    plan = GenerationPlan(Api.COMPLETIONS, "talk", prompts=8, n=128, stop_words=words)
    began_s = time.thread_time()
    body = TextBody(plan, IDENTITY)
    assert time.thread_time() - began_s < 0.2, "it was more than half a second"
    body.add(1023, Piece(b"a" + words[15].encode() + b"b"))
    assert body.is_stopped(1023)
    assert not body.is_stopped(0)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/completions", "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize("length", [10_000, 500_000])
def test_a_long_name_of_a_model_is_not_repeated(path: str, length: int) -> None:
    """The longer one is decoded by a helper, whose messages have a limit."""

    async def test(door: Door) -> None:
        common = {"messages": ASKED["messages"], "input": "a", "prompt": "a"}
        wanted = {CHAT: ["messages"], "/v1/completions": ["prompt"], "/tokenize": ["prompt"]}.get(path, ["input"])
        status, body = await door.post(path, {"model": "m" * length, **{name: common[name] for name in wanted}})
        assert status == 400
        assert body["error"]["message"].startswith("Unknown model: mmm")
        assert len(body["error"]["message"]) < 3000

    run(test, talk())


def test_a_long_name_of_a_tool_is_not_repeated() -> None:
    async def test(door: Door) -> None:
        choice = {"type": "function", "function": {"name": "n" * 1_000_000}}
        tools = [{"type": "function", "function": {"name": "f"}}]
        status, body = await door.post(CHAT, {**ASKED, "tools": tools, "tool_choice": choice})
        assert status == 400
        assert len(json.dumps(body)) < 10_000

    run(test, talk(more='parameters { key: "naiad.tool_parser" value { string_value: "hermes" } }'))

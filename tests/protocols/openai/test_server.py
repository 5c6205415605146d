from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import text_format

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import InternalError, InvalidArgument, QueueFull, Unavailable
from kernel.options import AdminOptions, HttpOptions, OpenAiOptions
from kernel.serving.response import Response
from shm.tensor import Tensor
from tests.protocols.openai.door import (
    ASKED,
    CHAT,
    NOW_S,
    VLLM,
    Door,
    Script,
    config,
    events_of,
    run,
    talk,
    text_tensor,
)

if TYPE_CHECKING:
    from kernel.serving.request import Request

COMPLETIONS = "/v1/completions"
PROMPTED: dict[str, Any] = {"model": "talk", "prompt": "Once"}


def contents(events: list[Any], index: int = 0) -> list[str]:
    """Return the texts of the chunks of one choice of a chat, without those that have none."""
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]


def finish_reasons(events: list[Any], index: int = 0) -> list[str]:
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def test_a_chat_is_one_body() -> None:
    async def test(door: Door) -> None:
        status, body = await door.post(CHAT, ASKED)
        assert status == 200
        assert body.pop("id").startswith("chatcmpl-")
        assert body == {
            "object": "chat.completion",
            "created": NOW_S,
            "model": "talk",
            "system_fingerprint": None,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": None,
        }
        assert model[1].asked == [ASKED]

    model = talk()
    run(test, model)


def test_a_completion_is_one_body() -> None:
    async def test(door: Door) -> None:
        status, body = await door.post(COMPLETIONS, {**PROMPTED, "echo": True})
        assert status == 200
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        [choice] = body["choices"]
        assert choice == {"index": 0, "text": "OnceHello, world", "logprobs": None, "finish_reason": "stop"}

    run(test, talk())


def test_a_stream_of_a_chat_has_a_role_the_texts_one_end_and_done() -> None:
    async def test(door: Door) -> None:
        events = await door.stream(CHAT, ASKED)
        assert events[0]["choices"] == [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        assert contents(events) == ["Hello", ",", " world"]
        assert finish_reasons(events) == ["stop"]
        assert events[-2]["choices"][0]["delta"] == {}
        assert events[-1] == "[DONE]"
        assert {event["id"] for event in events[:-1]} == {events[0]["id"]}
        assert all("usage" not in event for event in events[:-1])
        assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}

    run(test, talk())


def test_a_stream_of_a_completion_has_no_role() -> None:
    async def test(door: Door) -> None:
        events = await door.stream(COMPLETIONS, {**PROMPTED, "echo": True})
        assert [event["choices"][0]["text"] for event in events[:-1]] == ["OnceHello", ",", " world", ""]
        assert events[-2]["choices"][0]["finish_reason"] == "stop"

    run(test, talk())


def counted(self: Script, request: Request) -> None:
    for word in ("a", "b"):
        self.send(request, word, num_input_tokens=7, num_output_tokens=1)
    self.end(request)


def test_the_usage_is_the_sum_of_the_choices_and_counts_the_prompt_once() -> None:
    async def test(door: Door) -> None:
        _, body = await door.post(CHAT, {**ASKED, "n": 3})
        assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
        events = await door.stream(CHAT, {**ASKED, "n": 3, "stream_options": {"include_usage": True}})
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == body["usage"]
        assert all(event["usage"] is None for event in events[:-2])
        _, body = await door.post(COMPLETIONS, {**PROMPTED, "prompt": ["x", "y"]})
        assert body["usage"] == {"prompt_tokens": 14, "completion_tokens": 4, "total_tokens": 18}
        assert [choice["index"] for choice in body["choices"]] == [0, 1]

    run(test, talk(counted))


@pytest.mark.parametrize(
    ("limit", "given", "expected"),
    [(2, "", "length"), (3, "", "stop"), (2, "stop", "stop"), (9, "length", "length"), (9, "None", "stop")],
)
def test_the_end_is_named_by_the_model_or_by_the_count_of_tokens(limit: int, given: str, expected: str) -> None:
    def respond(self: Script, request: Request) -> None:
        self.send(request, "a", num_output_tokens=1, finish_reason="None")
        self.send(request, "b", num_output_tokens=1, finish_reason=given)
        self.end(request)

    async def test(door: Door) -> None:
        _, body = await door.post(CHAT, {**ASKED, "max_tokens": limit})
        assert body["choices"][0]["finish_reason"] == expected
        assert finish_reasons(await door.stream(CHAT, {**ASKED, "max_tokens": limit})) == [expected]

    run(test, talk(respond))


def test_a_stop_word_ends_the_text_and_the_work_of_the_model() -> None:
    def respond(self: Script, request: Request) -> None:
        for word in ("one ", "ST", "OP two"):
            self.send(request, word)

    async def test(door: Door) -> None:
        events = await door.stream(CHAT, {**ASKED, "stop": "STOP"})
        assert contents(events) == ["one "]
        assert finish_reasons(events) == ["stop"]
        _, body = await door.post(CHAT, {**ASKED, "stop": ["x", "STOP"]})
        assert body["choices"][0]["message"]["content"] == "one "
        assert [request.cancelled for request in script.requests] == [True, True]

    _, script = model = talk(respond)
    run(test, model)


def test_broken_characters_are_joined() -> None:
    def respond(self: Script, request: Request) -> None:
        for byte in "é🙂".encode():
            self.send(request, bytes([byte]))
        self.end(request)

    async def test(door: Door) -> None:
        assert contents(await door.stream(CHAT, ASKED)) == ["é", "🙂"]

    run(test, talk(respond))


def test_errors_before_the_first_response_have_their_status() -> None:
    errors = [
        (InvalidArgument("too long"), 400, "invalid_request_error"),
        (InternalError("broken"), 500, "server_error"),
        (Unavailable("gone"), 503, "service_unavailable"),
    ]

    def respond(self: Script, request: Request) -> None:
        self.end(request, errors[(len(self.asked) - 1) // 2][0])  # each is asked for twice

    async def test(door: Door) -> None:
        for error, status, kind in errors:
            expected = {"message": error.message, "type": kind, "param": None, "code": None}
            for stream in (False, True):
                found, body = await door.post(CHAT, {**ASKED, "stream": stream})
                assert (found, body) == (status, {"error": expected, "detail": error.message})

    run(test, talk(respond))


def test_an_error_within_a_stream_is_the_last_event() -> None:
    def respond(self: Script, request: Request) -> None:
        self.send(request, "a")
        asyncio.get_running_loop().call_later(0.01, self.end, request, InternalError("the worker has ended"))

    async def test(door: Door) -> None:
        events = await door.stream(CHAT, ASKED)
        assert [event for event in events if event == "[DONE]" or "error" in event] == [
            {"error": {"message": "the worker has ended", "type": "server_error", "param": None, "code": None}}
        ]
        assert "error" in events[-1]

    run(test, talk(respond))


def test_what_a_client_may_repeat_says_when() -> None:
    def respond(self: Script, request: Request) -> None:
        self.end(request, QueueFull(request.id))

    async def test(door: Door) -> None:
        async with door.session.post(CHAT, json=ASKED) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")

    run(test, talk(respond))


def test_a_model_that_is_not_there_or_makes_no_text_is_400() -> None:
    async def test(door: Door) -> None:
        status, body = await door.post(CHAT, {**ASKED, "model": "none"})
        assert (status, body["detail"]) == (400, "Unknown model: none")
        assert body["error"]["code"] == "model_not_found"
        status, body = await door.post(CHAT, {**ASKED, "model": "vectors"})
        assert status == 400
        assert body["detail"].startswith("model 'vectors' does not generate text: its inputs and outputs are none")

    run(test, talk(), (config("vectors", ("embedding",)), Script()))


def test_models_are_listed_and_described() -> None:
    async def test(door: Door) -> None:
        talk_model = {"id": "talk", "object": "model", "created": NOW_S, "owned_by": "Triton Inference Server"}
        assert await door.get("/v1/models") == (200, {"object": "list", "data": [talk_model]})
        assert await door.get("/v1/models/talk") == (200, talk_model)
        status, body = await door.get("/v1/models/org%2Fnone")
        assert (status, body["detail"]) == (404, "Unknown model: org/none")

    run(test, talk(), (config("vectors", ("embedding",)), Script()))


@pytest.mark.parametrize(
    ("method", "path", "status", "detail"),
    [
        ("GET", "/v1/nothing", 404, "Not Found"),
        ("GET", CHAT, 405, "Method Not Allowed"),
        ("POST", "/v1/models/a/b/load", 404, "Not Found"),
        ("POST", "/v1/models//load", 404, "Not Found"),
        ("POST", "/v1/models/talk/load", 400, "Model load/unload requires --model-control-mode=explicit"),
    ],
)
def test_other_paths_and_methods_are_refused(method: str, path: str, status: int, detail: str) -> None:
    async def test(door: Door) -> None:
        async with door.session.request(method, path) as response:
            assert (response.status, (await response.json())["detail"]) == (status, detail)
            assert response.headers["x-request-id"]
            assert response.headers.get("Allow") == ("POST" if status == 405 else None)

    run(test, talk())


def test_health_is_an_empty_body() -> None:
    async def test(door: Door) -> None:
        async with door.session.get("/health/ready") as response:
            assert (response.status, await response.read()) == (200, b"")

    run(test, talk())


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("x" * 129, False), ("a\u00e9", False), ("", False)])
def test_the_id_of_a_request_is_the_clients_if_it_is_short_and_printable(given: str, kept: bool) -> None:
    async def test(door: Door) -> None:
        for stream in (False, True):
            async with door.session.post(
                CHAT, json={**ASKED, "stream": stream}, headers={"X-Request-Id": given}
            ) as response:
                found = response.headers["x-request-id"]
                assert (found == given) is kept
                assert script.requests[-1].id == found

    _, script = model = talk()
    run(test, model)


def test_a_body_that_is_too_large_is_413_with_the_error_alone() -> None:
    async def chunks(size: int) -> Any:
        yield b"x" * size

    async def test(door: Door) -> None:
        text = "Request size of {} bytes exceeds the maximum allowed input size of 100 bytes. Use --http-max-input-size"
        for path, data in ((CHAT, b"x" * 101), (CHAT, chunks(101)), ("/v1/models/talk/load", b"x" * 101)):
            async with door.session.post(path, data=data) as response:
                assert response.status == 413
                body = await response.json()
                assert list(body) == ["error"]
                assert body["error"]["message"].startswith(text.format(101))
                assert body["error"]["code"] == "content_too_large"
        status, _ = await door.post(CHAT, b"x" * 100)
        assert status == 400

    run(test, talk(), http=HttpOptions(max_input_size=100))


def test_restrictions_of_http_hold_here() -> None:
    async def test(door: Door) -> None:
        status, body = await door.post(CHAT, ASKED)
        assert status == 401
        assert body == {
            "error": {
                "message": "This API is restricted, expecting header 'key'",
                "type": "authentication_error",
                "param": None,
                "code": "invalid_auth",
            }
        }
        assert (await door.post(CHAT, ASKED, headers={"key": "secret"}))[0] == 200
        assert (await door.get("/v1/models"))[0] == 200

    run(test, talk(), http=HttpOptions(restricted_api=("inference:key=secret",)))


def test_only_those_who_may_administer_the_server_load_models() -> None:
    async def test(door: Door) -> None:
        async with door.session.post("/v1/models/talk/unload") as response:
            assert response.status == 401

    run(test, talk(), admin=AdminOptions("key", "secret"))


def test_the_default_limit_is_the_operators() -> None:
    async def test(door: Door) -> None:
        await door.post(CHAT, ASKED)
        assert script.asked[0]["max_tokens"] == 5

    _, script = model = talk()
    run(test, model, openai=OpenAiOptions(default_max_tokens=5))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_requests(stream: bool) -> None:
    def respond(self: Script, request: Request) -> None:
        self.send(request, "a")

    async def test(door: Door) -> None:
        task = asyncio.ensure_future(door.post(CHAT, {**ASKED, "n": 2, "stream": stream}))
        while len(script.requests) < 2:  # noqa: ASYNC110 - the model has no event for it
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(60):
            while not all(request.cancelled for request in script.requests):  # noqa: ASYNC110 - nor for that
                await asyncio.sleep(0.001)

    _, script = model = talk(respond)
    run(test, model)


def test_a_failed_choice_ends_the_others() -> None:
    def respond(self: Script, request: Request) -> None:
        if len(self.requests) == 2:
            self.end(request, InternalError("broken"))

    async def test(door: Door) -> None:
        assert (await door.post(CHAT, {**ASKED, "n": 2}))[0] == 500
        assert script.requests[0].cancelled

    _, script = model = talk(respond)
    run(test, model)


def test_responses_that_wait_are_sent_in_one_write_and_credited_together() -> None:
    def respond(self: Script, request: Request) -> None:
        for _ in range(100):
            self.send(request, "w ")
        self.end(request)

    async def test(door: Door) -> None:
        events = await door.stream(CHAT, ASKED)
        assert "".join(contents(events)) == "w " * 100
        assert script.instance.credit == {}  # the request had ended before: nothing to give

    _, script = model = talk(respond)
    run(test, model)


def test_credit_is_given_for_what_was_taken() -> None:
    def respond(self: Script, request: Request) -> None:
        for _ in range(3):
            self.send(request, "w ")

    async def test(door: Door) -> None:
        async with door.session.post(CHAT, json={**ASKED, "stream": True}) as response:
            await response.content.readuntil(b'"w "')
            [request] = script.requests
            assert script.instance.credit[request] == 3
            script.end(request)
            assert events_of(b"data: 0\n\n" + (await response.read()).partition(b"\n\n")[2])[-1] == "[DONE]"

    _, script = model = talk(respond)
    run(test, model)


def test_a_silent_model_gets_the_head_sent_and_comments() -> None:
    def respond(self: Script, request: Request) -> None: ...

    async def test(door: Door) -> None:
        silence = door.server.silence
        task = asyncio.ensure_future(door.session.post(CHAT, json={**ASKED, "stream": True}))
        await script.got_request.wait()
        while not silence.count:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        silence.look()
        response = await task
        assert await response.content.readline() == b": waiting for the model\n"
        for _ in range(15):
            silence.look()
        await response.content.readline()
        assert await response.content.readline() == b": waiting for the model\n"
        script.say_hello(script.requests[0])
        assert b"[DONE]" in await response.read()
        assert silence.count == 0

    _, script = model = talk(respond)
    run(test, model)


def test_a_large_body_is_decoded_by_helpers() -> None:
    messages = [{"role": "user", "content": "é" * 100_000}]

    async def test(door: Door) -> None:
        status, body = await door.post(CHAT, {**ASKED, "messages": messages, "n": 2, "stop": "world", "seed": 4})
        assert status == 200
        assert [choice["message"]["content"] for choice in body["choices"]] == ["Hello, ", "Hello, "]
        assert door.lab.helpers.started == ["openai.find_model", "openai.prepare"]
        assert [asked["messages"] for asked in script.asked] == [messages, messages]
        assert [asked["seed"] for asked in script.asked] == [4, 5]

    _, script = model = talk()
    run(test, model)


@pytest.mark.parametrize(
    ("more", "status", "detail"),
    [
        ({"model": "none"}, 400, "Unknown model: none"),
        ({"temperature": 9}, 422, "Input should be less than or equal to 2"),
        ({"logit_bias": {"1": 1}}, 400, "'logit_bias' is not supported"),
    ],
)
def test_what_is_wrong_with_a_large_body_is_said_as_with_a_small_one(
    more: dict[str, Any], status: int, detail: str
) -> None:
    async def test(door: Door) -> None:
        for length in (1, 100_000):
            messages = [{"role": "user", "content": "x" * length}]
            found, body = await door.post(CHAT, {**ASKED, "messages": messages, **more})
            assert found == status
            assert detail in body["error"]["message"]

    run(test, talk())


def test_a_model_may_make_its_chunks_itself() -> None:
    def respond(self: Script, request: Request) -> None:
        ready = {"id": "mine", "choices": [{"index": 0, "delta": {"content": "a\nb", "reasoning": "why"}}], "x": 1}
        if not self.asked[-1].get("stream"):
            ready["choices"] = [{"index": 0, "message": {"content": "all"}, "finish_reason": "tool_calls"}]
        outputs = [json.dumps(ready, indent=1)]
        for text in outputs:
            output = text_tensor("openai_response", text)
            request.respond(Response("talk", "1", request.id, outputs=[output], final=False))
        self.end(request)

    async def test(door: Door) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        events = await door.stream(CHAT, {**ASKED, "tools": tools})
        assert script.asked[0]["tools"] == tools
        [chunk, done] = events
        assert done == "[DONE]"
        assert chunk["choices"] == [{"index": 0, "delta": {"content": "a\nb", "reasoning": "why"}}]
        assert (chunk["object"], chunk["created"], chunk["x"]) == ("chat.completion.chunk", NOW_S, 1)
        assert chunk["id"].startswith("chatcmpl-")
        _, body = await door.post(CHAT, ASKED)
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        assert body["object"] == "chat.completion"

    declared = 'parameters { key: "naiad.openai_fields" value { string_value: "tools" } }'
    _, script = model = talk(respond, ("openai_response",), declared)
    run(test, model)


def test_a_model_of_vllms_backend_completes_a_text() -> None:
    def respond(self: Script, request: Request) -> None:
        self.inputs = {tensor.name: bytes(tensor.raw()) for tensor in request.inputs}
        for text, reason in (("a", "None"), ("b", "length")):
            self.send(request, text, finish_reason=reason, num_input_tokens=4, num_output_tokens=1)
        self.end(request)

    async def test(door: Door) -> None:
        asked = {**PROMPTED, "max_tokens": 2, "top_k": 3, "echo": True, "stream_options": {"include_usage": True}}
        events = await door.stream(COMPLETIONS, asked)
        assert [choice["text"] for event in events[:-1] for choice in event["choices"]] == ["Oncea", "b", ""]
        assert finish_reasons(events) == ["length"]
        assert events[-2]["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
        assert script.inputs["text_input"][4:] == b"Once"
        assert json.loads(script.inputs["sampling_parameters"][4:]) == {"max_tokens": 2, "top_k": 3}
        assert (await door.post(CHAT, ASKED))[0] == 400
        assert [model["id"] for model in (await door.get("/v1/models"))[1]["data"]] == ["talk"]

    name = ModelConfig(name="talk", backend="vllm", model_transaction_policy={"decoupled": True})
    script = Script(respond, reads=False)
    run(test, (text_format.Parse(VLLM, name), script))


def test_a_long_body_comes_in_parts_and_whole() -> None:
    text = 'é"\n' * 50_000

    def respond(self: Script, request: Request) -> None:
        for _ in range(3):
            self.send(request, text, num_input_tokens=1, num_output_tokens=1)
        self.end(request)

    async def test(door: Door) -> None:
        async with door.session.post(CHAT, json={**ASKED, "n": 2}) as response:
            body = await response.json()
            assert int(response.headers["Content-Length"]) == len(await response.read()) > 600_000
            assert response.headers["Content-Type"] == "application/json"
            assert response.headers["x-request-id"]
        assert [choice["message"]["content"] for choice in body["choices"]] == [text * 3] * 2
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}
        assert (await door.post(CHAT, ASKED))[0] == 200  # over the same connection

    run(test, talk(respond))


def test_log_probabilities_of_vllms_backend_come_with_their_text() -> None:
    with_probabilities = """
    input { name: "return_logprobs" data_type: TYPE_BOOL dims: [1] optional: true }
    output { name: "logprobs" data_type: TYPE_STRING dims: [-1] }
    """

    def respond(self: Script, request: Request) -> None:
        self.inputs = {tensor.name: bytes(tensor.raw()) for tensor in request.inputs}
        for text in ("a", "b"):
            said = json.dumps([{"1": {"logprob": -0.5, "rank": 1, "decoded_token": text}}])
            self.send(request, text, finish_reason="None", logprobs=said)
        self.end(request)

    async def test(door: Door) -> None:
        asked = {**PROMPTED, "logprobs": 3}
        status, body = await door.post(COMPLETIONS, asked)
        expected = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.5], "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
                    "text_offset": [0, 1]}  # fmt: skip
        assert (status, body["choices"][0]["text"], body["choices"][0]["logprobs"]) == (200, "ab", expected)
        # One response for each token, so that none is long.
        assert (script.inputs["stream"], script.inputs["return_logprobs"]) == (b"\1", b"\1")
        assert json.loads(script.inputs["sampling_parameters"][4:])["logprobs"] == 3
        choices = [event["choices"][0] for event in (await door.stream(COMPLETIONS, asked))[:-1]]
        assert [(each["text"], each["logprobs"] and each["logprobs"]["text_offset"]) for each in choices] == [
            ("a", [0]), ("b", [1]), ("", None)
        ]  # fmt: skip
        assert (await door.post(COMPLETIONS, PROMPTED))[1]["choices"][0]["logprobs"] is None
        assert "return_logprobs" not in script.inputs

    name = ModelConfig(name="talk", backend="vllm", model_transaction_policy={"decoupled": True})
    script = Script(respond, reads=False)
    run(test, (text_format.Parse(VLLM + with_probabilities, name), script))


def test_a_text_model_cannot_declare_what_is_no_text() -> None:
    async def test(door: Door) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        status, body = await door.post(CHAT, {**ASKED, "tools": tools})
        assert (status, body["error"]["param"]) == (400, "tools")

    declared = 'parameters { key: "naiad.openai_fields" value { string_value: "tools" } }'
    run(test, talk(more=declared))


@pytest.mark.parametrize("data", [b"", b"\x05\x00\x00\x00abc", b"\x01\x00\x00\x00a\x01\x00\x00\x00b"])
def test_an_output_that_is_no_single_text_is_an_error_of_the_model(data: bytes) -> None:
    def respond(self: Script, request: Request) -> None:
        outputs = [Tensor("text_output", "BYTES", [2], data)]
        request.respond(Response("talk", "1", request.id, outputs=outputs))

    async def test(door: Door) -> None:
        status, body = await door.post(CHAT, ASKED)
        assert status == 500
        assert "the model's output 'text_output' is BYTES of shape [2], expected one text" in body["detail"]

    run(test, talk(respond))

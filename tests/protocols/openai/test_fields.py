from __future__ import annotations

import importlib
import json
import typing
from typing import Any

import pytest

from protocols.openai.errors import ApiError, error_body, status_of
from protocols.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, Field, Treatment, checked
from protocols.openai.plans import Api
from tests.protocols.openai.request_bodies import MESSAGES, chat, completion, plan_of, refusal

EVERYTHING = frozenset(name for name, field in CHAT_FIELDS.items() if field.treatment is Treatment.DECLARED)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"temperature": 2.1}, "temperature", "Input should be less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "Input should be a valid number"),
        ({"temperature": True}, "temperature", "Input should be a valid number"),
        ({"top_p": -0.1}, "top_p", "Input should be greater than or equal to 0"),
        ({"n": 0}, "n", "Input should be greater than or equal to 1"),
        ({"n": 129}, "n", "Input should be less than or equal to 128"),
        ({"n": True}, "n", "Input should be a valid integer"),
        ({"max_tokens": -1}, "max_tokens", "Input should be greater than or equal to 0"),
        ({"max_tokens": 1.5}, "max_tokens", "Input should be a valid integer"),
        ({"seed": 2**63}, "seed", f"Input should be less than or equal to {2**63 - 1}"),
        ({"stream": "yes"}, "stream", "Input should be a valid boolean"),
        ({"stop": [1]}, "stop", "Input should be a valid string, or a list of valid strings"),
        ({"stop": ["x" * 257]}, "stop", "A stop word should have at most 256 characters, not 257"),
        ({"stop": [str(n) for n in range(17)]}, "stop", "List should have at most 16 stop words, not 17"),
        ({"top_logprobs": 25}, "top_logprobs", "Input should be less than or equal to 20"),
        ({"messages": []}, "messages", "List should have at least 1 item after validation, not 0"),
        ({"messages": None}, "messages", "Input should be a valid list"),
        ({"messages": ["hello"]}, "messages.0", "Input should be a valid dictionary"),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "Field required"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "Input should be a valid string"),
        ({"model": 1}, "model", "Input should be a valid string"),
        ({"invented": 1}, "invented", "Extra inputs are not permitted"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_value_is_422_with_the_field_and_the_text_of_triton(
    fields: dict[str, Any], param: str, text: str
) -> None:
    assert refusal(chat(**fields)) == (422, param, text)


def test_a_required_field_that_is_missing_is_422() -> None:
    assert refusal({"model": "m"}) == (422, "messages", "Field required")
    assert refusal({"messages": MESSAGES}) == (422, "model", "Field required")
    assert refusal({"model": "m"}, Api.COMPLETIONS) == (422, "prompt", "Field required")
    assert refusal({}, Api.COMPLETIONS)[0] == 422


@pytest.mark.parametrize("body", [b"", b"{", b'{"model":"\xff"}', b"[" * 100_000, b'{"model":1e999}'])
def test_a_body_that_is_no_json_is_400(body: bytes) -> None:
    status, _, text = refusal(body)
    assert status == 400
    assert text.startswith("the body is not valid JSON")


@pytest.mark.parametrize("body", [b"[]", b"1", b"null"])
def test_a_body_that_is_no_object_is_422(body: bytes) -> None:
    assert refusal(body)[0] == 422


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_a_field_that_the_model_does_not_declare_is_refused_by_name(name: str) -> None:
    field = CHAT_FIELDS[name]
    for value in (True, False, 1, "low", ["a"], {"a": 1}, {"type": "json_object"}):
        try:
            asked = name in checked(chat(**{name: value}), CHAT_FIELDS)
        except ApiError:
            continue  # no value of this field
        if asked and name != "top_logprobs":
            status, param, text = refusal(chat(**{name: value}))
            assert (status, param) == (400, name)
            assert text == (
                f"'{name}' is not supported: model 'm' does not say that it honours it (naiad.openai_fields)"
            )
            _, [given] = plan_of(chat(**{name: value}), honoured=EVERYTHING)
            assert given[name] == value
            break
    else:
        assert name == "top_logprobs", f"no value of {field} was tried"


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        (Api.CHAT, chat(chat_template="{{ x }}"), "chat_template"),
        (Api.CHAT, chat(moderation={}), "moderation"),
        (
            Api.CHAT,
            chat(stream=True, stream_options={"include_obfuscation": True}),
            "stream_options.include_obfuscation",
        ),
        (Api.COMPLETIONS, completion(best_of=2), "best_of"),
        (Api.COMPLETIONS, completion(suffix="x"), "suffix"),
        (Api.COMPLETIONS, completion(logprobs=1), "logprobs"),
        (Api.COMPLETIONS, completion(prompt=[1, 2]), "prompt"),
        (Api.CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages.0.content.0"),
    ],
)
def test_what_cannot_be_done_is_400_with_the_field(api: Api, body: dict[str, Any], param: str) -> None:
    status, found, text = refusal(body, api)
    assert (status, found) == (400, param)
    assert "is not supported" in text


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS.keys() - {"messages", "model"}))
def test_null_is_the_absence_of_a_field(name: str) -> None:
    plan, [given] = plan_of(chat(**{name: None}))
    assert plan == plan_of(chat())[0]
    assert given == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none"}, {"parallel_tool_calls": True}, {"response_format": {"type": "text"}},
        {"modalities": ["text"]}, {"logprobs": False}, {"stop": []}, {"logit_bias": {}}, {"tool_choice": "auto"},
    ],
)  # fmt: skip
def test_values_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert plan_of(chat(**fields))[1] == [chat()]


def test_fields_without_effect_do_not_reach_the_model() -> None:
    without = {"metadata": {"a": "b"}, "user": "me", "store": True, "service_tier": "auto", "prediction": {}}
    assert plan_of(chat(**without))[1] == [chat()]


def test_the_error_is_read_by_both_kinds_of_clients() -> None:
    with pytest.raises(ApiError) as caught:
        plan_of({"model": "m"})
    assert status_of(caught.value) == 422
    assert json.loads(error_body(caught.value)) == {
        "error": {
            "message": "messages: Field required",
            "type": "invalid_request_error",
            "param": "messages",
            "code": None,
        },
        "detail": [{"type": "missing", "loc": ["body", "messages"], "msg": "Field required"}],
    }


@pytest.mark.parametrize(
    ("module", "params", "table"),
    [
        ("openai.types.chat.completion_create_params", "CompletionCreateParamsStreaming", CHAT_FIELDS),
        ("openai.types.completion_create_params", "CompletionCreateParamsStreaming", COMPLETION_FIELDS),
    ],
)
def test_every_field_of_the_newest_client_is_in_the_table(module: str, params: str, table: dict[str, Field]) -> None:
    known = typing.get_type_hints(getattr(importlib.import_module(module), params))
    assert len(known) > 15
    assert known.keys() - table.keys() == set()

from __future__ import annotations

import json

import pytest

from protocols.openai.errors import ApiError
from protocols.openai.plans import Api
from tests.protocols.openai.request_bodies import MESSAGES, chat, completion, plan_of, refusal


def test_a_chat_without_a_limit_ends_when_the_model_ends() -> None:
    plan, [given] = plan_of(chat())
    assert plan.max_tokens is None
    assert "max_tokens" not in given


def test_completions_without_a_limit_have_16_tokens() -> None:
    plan, [given] = plan_of(completion(), Api.COMPLETIONS)
    assert (plan.max_tokens, given["max_tokens"]) == (16, 16)


def test_the_limit_of_the_operator_is_for_both() -> None:
    assert plan_of(chat(), default_max_tokens=7)[1][0]["max_tokens"] == 7
    assert plan_of(completion(), Api.COMPLETIONS, default_max_tokens=7)[1][0]["max_tokens"] == 7


def test_the_newer_limit_of_the_client_comes_first_and_the_model_reads_one_name() -> None:
    plan, [given] = plan_of(chat(max_tokens=5, max_completion_tokens=3), default_max_tokens=7)
    assert plan.max_tokens == given["max_tokens"] == 3
    assert "max_completion_tokens" not in given


def test_each_choice_is_a_request_with_a_seed_of_its_own() -> None:
    plan, given = plan_of(chat(n=3, seed=2**63 - 1))
    assert plan.choices == 3
    assert [each["seed"] for each in given] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert all("n" not in each and each["messages"] == MESSAGES for each in given)


def test_each_prompt_has_its_choices_in_order() -> None:
    plan, given = plan_of(completion(prompt=["a", "b"], n=2, echo=True, seed=1), Api.COMPLETIONS)
    assert (plan.prompts, plan.n, plan.echoed) == (2, 2, ["a", "b"])
    assert [(each["prompt"], each["seed"]) for each in given] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert all("echo" not in each for each in given)


def test_a_model_that_makes_its_responses_gets_one_request_with_everything() -> None:
    plan, given = plan_of(completion(prompt=["a", "b"], n=2, echo=True), Api.COMPLETIONS, ready=True)
    assert given == [completion(prompt=["a", "b"], n=2, echo=True, max_tokens=16)]
    assert plan.echoed == []


def test_token_ids_are_a_prompt_of_models_that_declare_them() -> None:
    ids = frozenset({"prompt_token_ids"})
    assert plan_of(completion(prompt=[1, 2]), Api.COMPLETIONS, ids)[1][0]["prompt"] == [1, 2]
    given = plan_of(completion(prompt=[[1], [2, 3]]), Api.COMPLETIONS, ids)[1]
    assert [each["prompt"] for each in given] == [[1], [2, 3]]
    assert refusal(completion(prompt=[1], echo=True), Api.COMPLETIONS, honoured=ids)[:2] == (400, "echo")


@pytest.mark.parametrize("prompt", ["", [], ["a", ""]])
def test_an_empty_prompt_is_refused(prompt: object) -> None:
    assert refusal(completion(prompt=prompt), Api.COMPLETIONS) == (400, "prompt", "prompt must be non-empty")


@pytest.mark.parametrize("prompt", [1, {"a": 1}, ["a", 1], [True], [[1.5]], [-1]])
def test_what_is_no_prompt_is_422(prompt: object) -> None:
    assert refusal(completion(prompt=prompt), Api.COMPLETIONS)[0] == 422


def test_the_fan_out_is_limited() -> None:
    assert refusal(completion(prompt=["a"] * 1000, n=2), Api.COMPLETIONS) == (
        400, "n", "the request asks for 2000 choices, expected at most 1024"
    )  # fmt: skip
    assert len(plan_of(completion(prompt=["a"] * 1024), Api.COMPLETIONS)[1]) == 1024


def test_a_small_body_cannot_become_many_large_requests() -> None:
    body = chat(messages=[{"role": "user", "content": "x" * 100_000}], n=128)
    status, param, text = refusal(body)
    assert (status, param) == (400, "n")
    assert "take more than 4194304 bytes together" in text


def test_a_message_of_text_parts_becomes_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    _, [given] = plan_of(chat(messages=[{"role": "user", "content": parts}]))
    assert given["messages"] == [{"role": "user", "content": "one\ntwo"}]


def test_parts_that_the_model_declares_reach_it_as_they_are() -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    messages = [{"role": "user", "content": parts}]
    assert plan_of(chat(messages=messages), honoured=frozenset({"image_url"}))[1][0]["messages"] == messages


def test_options_of_a_stream_need_a_stream() -> None:
    assert refusal(chat(stream_options={"include_usage": True})) == (
        400, "stream_options", "`stream_options` can only be used when `stream` is True"
    )  # fmt: skip
    plan, _ = plan_of(chat(stream=True, stream_options={"include_usage": True}))
    assert plan.include_usage


def test_top_logprobs_need_logprobs() -> None:
    both = frozenset({"logprobs", "top_logprobs"})
    assert refusal(chat(top_logprobs=2), honoured=both) == (
        400, "top_logprobs", "`top_logprobs` can only be used when `logprobs` is True"
    )  # fmt: skip


def test_a_history_with_tools_reaches_the_model() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    assert plan_of(chat(messages=messages))[1][0]["messages"] == messages


def test_a_large_echo_is_refused() -> None:
    status, param, _ = refusal(completion(prompt="x" * 300_000, echo=True), Api.COMPLETIONS)
    assert (status, param) == (400, "echo")


def test_deep_json_is_an_error_and_no_crash() -> None:
    body = json.dumps(chat()).encode()[:-1] + b',"metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001
    with pytest.raises(ApiError, match="not valid JSON"):
        plan_of(body)

"""What clients read of the log probabilities that vLLM's backend writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernel.errors import InternalError
from protocols.openai.logprobs import TokenLogprobs
from protocols.openai.plans import Api, GenerationPlan


def token(text: str | None, logprob: float, rank: int | None = 1) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


#: The second token was taken although two others were likelier.
TOKENS = [
    {"5": token(" é", -0.5), "6": token(" b", -1.5, 2)},
    {"9": token("z", -4.25, 7), "7": token("x", -0.25), "8": token("y", -1.0, 2)},
]


def members(reader: TokenLogprobs, *responses: Any, number: int = 0) -> Any:
    """Return what a client reads of these responses together."""
    found = [reader.read(number, json.dumps(each).encode()) for each in responses]
    return json.loads(reader.members([each for each in found if each]))


def chat(top: int) -> TokenLogprobs:
    return TokenLogprobs(GenerationPlan(Api.CHAT, "talk", logprobs=top))


def test_a_chat_has_an_entry_for_each_token_the_likeliest_first() -> None:
    first, second = members(chat(2), TOKENS)["content"]
    assert first == {
        "token": " é", "logprob": -0.5, "bytes": [32, 195, 169],
        "top_logprobs": [
            {"token": " é", "logprob": -0.5, "bytes": [32, 195, 169]},
            {"token": " b", "logprob": -1.5, "bytes": [32, 98]},
        ],
    }  # fmt: skip
    assert second["token"] == "z"
    assert [each["token"] for each in second["top_logprobs"]] == ["x", "y"]
    assert [each["top_logprobs"] for each in members(chat(0), TOKENS)["content"]] == [[], []]


def test_a_completion_has_columns_whose_offsets_go_on_behind_the_repeated_prompt() -> None:
    for split in (0, 1, 2):
        plan = GenerationPlan(Api.COMPLETIONS, "talk", prompts=2, n=2, echoed=["ab", "abcd"], logprobs=3)
        reader = TokenLogprobs(plan)
        assert members(reader, TOKENS[:split], TOKENS[split:], number=2) == {
            "tokens": [" é", "z"],
            "token_logprobs": [-0.5, -4.25],
            "top_logprobs": [{" é": -0.5, " b": -1.5}, {"z": -4.25, "x": -0.25, "y": -1.0}],
            "text_offset": [4, 6],
        }
        assert members(reader, TOKENS, number=0)["text_offset"] == [2, 4]


def test_what_json_does_not_have_is_the_least_probability() -> None:
    for value in (float("-inf"), float("nan"), -1e30):
        [entry] = members(chat(0), [{"5": token(None, value, None)}])["content"]
        assert entry == {"token": "", "logprob": -9999.0, "bytes": [], "top_logprobs": []}


def test_a_response_without_them_has_none() -> None:
    responses: list[Any] = [None, [], [{}]]
    for response in responses:
        assert members(chat(1), response) is None


@pytest.mark.parametrize("encoded", [b"", b"[1]", b'[{"5": {}}]', b"{", b"\xff", b"[" * 100_000,
                                     b'[{"5": {"logprob": 1, "decoded_token": "\\ud800"}}]'])  # fmt: skip
def test_another_form_is_an_error_of_the_model(encoded: bytes) -> None:
    with pytest.raises(InternalError, match="the model's output 'logprobs' is not what vLLM's backend writes"):
        chat(1).read(0, encoded)

"""What a client can send has limits, and takes work in proportion: of responses that repeat it, texts, and calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import NoDescriptorLeft, NoMemory, Unavailable
from protocols.openai.errors import ApiError
from protocols.openai.fields import RESPONSE_FIELDS, checked
from protocols.openai.plans import MAX_TOOL_NAME
from protocols.openai.preparing import MAX_RESTING_BYTE_SIZE, TextTasks
from protocols.openai.response_requests import MAX_REPEATED, as_chat
from protocols.openai.texts import MAX_TEXT, MAX_TOKEN_IDS, ModelTexts
from protocols.openai.tools import MAX_CALL, FoundCall, ToolText, function_calls, new_parser
from shm.tensor import Tensor
from tests.protocols.openai.door import ASKED, CHAT, Door, run, talk

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.errors import ServingError
    from kernel.serving.helper_tasks import HelperTask


class Failing:
    """Helpers whose tasks all fail. `Helpers`."""

    def __init__(self, error: ServingError) -> None:
        self.error = error

    def add(self, task: HelperTask) -> None:
        task.failed(self.error)

    def cancel(self, task: HelperTask) -> None:
        raise AssertionError("no task waits")


def failures(error: ServingError, byte_size: int = 2) -> list[str]:
    """Return the errors of two requests to one model whose tasks fail with `error`."""

    async def ask() -> list[str]:
        kernel: Any = SimpleNamespace(text_helpers=Failing(error))
        texts = TextTasks(kernel, lambda: 5.0)
        found = []
        for _ in range(2):
            with pytest.raises((ApiError, Unavailable)) as caught:
                await texts.run("m", "task", b"", [Tensor("", "UINT8", [byte_size], bytes(byte_size))])
            found.append(caught.value.text)
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize("error", [NoMemory("no memory"), NoDescriptorLeft()])
def test_a_server_that_has_little_left_does_not_let_a_model_rest(error: ServingError) -> None:
    assert failures(error) == [error.text] * 2


def test_a_model_whose_template_has_hung_rests_unless_the_request_was_large() -> None:
    _, second = failures(Unavailable("it has hung"))
    assert "is tried again in 10 s" in second
    _, second = failures(Unavailable("it has hung"), MAX_RESTING_BYTE_SIZE + 1)
    assert "it has hung" in second


def test_what_a_response_repeats_has_a_limit() -> None:
    def asked(**more: Any) -> dict[str, Any]:
        return checked({"model": "m", "input": "hi", **more}, RESPONSE_FIELDS)

    half = "x" * (MAX_REPEATED // 2)
    assert len(as_chat(asked(instructions=half)).repeated) < MAX_REPEATED
    with pytest.raises(ApiError, match=r"repeats of the request.*expected at most 1048576") as caught:
        as_chat(asked(instructions=half, tools=[{"type": "function", "name": "f", "description": half}]))
    assert caught.value.status == 413


def test_the_name_of_a_tool_has_a_limit() -> None:
    async def test(door: Door) -> None:
        for length, expected in ((MAX_TOOL_NAME, 200), (MAX_TOOL_NAME + 1, 422)):
            tools = [{"type": "function", "function": {"name": "f" * length}}]
            status, body = await door.post(CHAT, {**ASKED, "tools": tools})
            assert status == expected, body

    run(test, talk(more='parameters { key: "naiad.tool_parser" value { string_value: "hermes" } }'))


class Counted(str):
    """A text that counts how many of its characters are looked at to find others."""

    __slots__ = ("looked",)

    def find(self, wanted: str, begin: Any = 0, end: Any = None, /) -> int:
        found = super().find(wanted, begin, end)
        stop = len(self) if end is None else end
        self.looked: int = getattr(self, "looked", 0) + (stop if found < 0 else found + len(wanted)) - begin
        return found


@pytest.mark.parametrize(
    "part",
    ["<function=a>", "<function=", "<function=\n>", "<function=a></function>", "<function=a><parameter=b>"],
)
@pytest.mark.parametrize("last", ["", "</function>", "<parameter=b>" * 500 + "</function>"])
def test_tags_without_an_end_are_looked_at_a_limited_number_of_times(part: str, last: str) -> None:
    text = Counted(part * 2000 + last)
    text.looked = 0
    function_calls(text)
    assert text.looked <= 40 * len(text)
    assert (text.looked == 0) == ("<parameter" in part), "too many parameters are no call, without a look"


@pytest.mark.parametrize(
    ("parser", "begin", "end"),
    [("hermes", '<tool_call>{"name":"a","arguments":{"x":"', '"}}</tool_call>'),
     ("llama3", '{"name":"a","arguments":{"x":"', '"}}')],
)  # fmt: skip
@pytest.mark.parametrize("piece", [1 << 10, 1 << 30])
def test_a_call_that_is_too_long_is_text_also_in_one_piece(parser: str, begin: str, end: str, piece: int) -> None:
    def found(length: int) -> list[object]:
        text, out = begin + "x" * length + end, ToolText(new_parser(parser))
        parts = [each for place in range(0, len(text), piece) for each in out.add(text[place : place + piece])]
        return [*parts, *out.end()]

    [call] = found(MAX_CALL - 100)
    assert isinstance(call, FoundCall)
    long = found(MAX_CALL)
    assert "".join(map(str, long)) == begin + "x" * MAX_CALL + end


@pytest.mark.parametrize("what", ["text", "tokens"])
def test_long_texts_and_lists_are_refused_before_a_tokenizer_gets_them(what: str, tmp_path: Path) -> None:
    model = ModelTexts(tmp_path)  # it has no tokenizer, which would be another error
    long, many = "x" * (MAX_TEXT + 1), [1] * (MAX_TOKEN_IDS + 1)
    with pytest.raises(ApiError, match="expected at most") as caught:
        _ = model.tokens(long, add_special_tokens=True) if what == "text" else model.text(many)
    assert caught.value.status == 413


def test_arguments_that_are_nested_too_deep_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":' + "[" * 200_000}}
    with pytest.raises(ApiError, match="the arguments of a tool call are not valid JSON") as caught:
        ModelTexts(tmp_path).prompt({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert caught.value.status == 400

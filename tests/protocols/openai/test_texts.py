"""Chat templates are rendered as transformers renders them, and tokenizers are read from the model's folder."""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from protocols.openai import texts
from protocols.openai.errors import ApiError
from protocols.openai.texts import ModelTexts, texts_of
from tests.protocols.openai.golden_prompts import CONVERSATIONS, FOLDER, GOLDEN, TOKENS, word_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def folder_with(folder: Path, template: str | None = PLAIN, **config: Any) -> ModelTexts:
    """Write the files of a model, and return its texts."""
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ModelTexts(folder)


def sent(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as clients send them: arguments of calls are text."""
    fields = copy.deepcopy(fields)
    for message in fields["messages"]:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return fields


GOLDEN_PROMPTS = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", sorted(GOLDEN_PROMPTS))
@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
def test_a_prompt_is_what_transformers_makes(family: str, name: str, tmp_path: Path) -> None:
    template = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
    model = folder_with(tmp_path, template, **TOKENS)
    expected = GOLDEN_PROMPTS[family][name]
    if expected is None:
        with pytest.raises(ApiError, match="the chat template refuses the messages"):
            model.prompt(sent(CONVERSATIONS[name]))
    else:
        assert model.prompt(sent(CONVERSATIONS[name])) == expected


def test_every_template_and_conversation_has_a_golden_prompt() -> None:
    assert set(GOLDEN_PROMPTS) == {file.stem for file in FOLDER.glob("*.jinja")}
    assert all(set(prompts) == set(CONVERSATIONS) for prompts in GOLDEN_PROMPTS.values())
    refused = sum(prompt is None for prompts in GOLDEN_PROMPTS.values() for prompt in prompts.values())
    assert 0 < refused < 6


def test_a_template_of_the_configuration_is_used_and_a_file_wins(tmp_path: Path) -> None:
    assert folder_with(tmp_path, None, chat_template="c {{ messages[0].content }}").prompt(HI) == "c hi"
    assert folder_with(tmp_path, "f {{ messages[0].content }}", chat_template="c").prompt(HI) == "f hi"


def test_with_tools_a_template_for_tools_is_used(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    model = folder_with(tmp_path, None, chat_template=both)
    assert model.prompt(HI) == "plain"
    assert model.prompt({**HI, "tools": [{}, {}]}) == "2 tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("beside")
    assert ModelTexts(tmp_path).prompt({**HI, "tools": [{}]}) == "beside"


def test_without_a_template_the_error_is_that_of_transformers(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="Cannot use chat template functions because tokenizer.chat_template is not set"):
        folder_with(tmp_path, None).prompt(HI)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__ }}", "{{ messages.append(1) }}",
     "{{ range(1000000) | list }}",
     "{{ cycler.__init__.__globals__ }}", "{{ 'a{0.__class__}'.format(1) }}"],
)  # fmt: skip
def test_a_template_reaches_nothing_but_its_values(template: str, tmp_path: Path) -> None:
    text = ""  # jinja2 leaves such an attribute out where nothing is done with it
    with contextlib.suppress(ApiError):
        text = folder_with(tmp_path, template).prompt(HI)
    assert text in ("", "a")


def test_a_wrong_template_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="the model's chat template is wrong in line 2: ") as refused:
        folder_with(tmp_path, "\n{% for %}").prompt(HI)
    assert refused.value.status == 500


def test_a_template_refuses_with_its_own_text(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="the chat template refuses the messages: no hi") as refused:
        folder_with(tmp_path, "{{ raise_exception('no ' + messages[0].content) }}").prompt(HI)
    assert refused.value.status == 400


def test_the_developer_is_the_system_where_the_template_knows_none(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "developer", "content": "x"}]}
    assert folder_with(tmp_path).prompt(asked) == "system:x;"
    assert folder_with(tmp_path, PLAIN + "{# developer #}").prompt(asked) == "developer:x;"


def test_arguments_that_are_no_json_are_refused(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    asked = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    with pytest.raises(ApiError, match="the arguments of a tool call are not valid JSON"):
        folder_with(tmp_path).prompt(asked)


def test_the_date_is_that_of_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "now", lambda: datetime.datetime(2026, 11, 28))
    assert folder_with(tmp_path, "{{ strftime_now('%d %b %Y') }}").prompt(HI) == "28 Nov 2026"


def test_a_token_that_the_engine_adds_is_not_in_the_prompt_twice(tmp_path: Path) -> None:
    template = "{{ bos_token }}" + PLAIN
    assert folder_with(tmp_path, template, bos_token="<s>").prompt_for_engine(HI) == "<s>user:hi;"
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert ModelTexts(tmp_path).prompt_for_engine(HI) == "user:hi;"
    assert ModelTexts(tmp_path).prompt(HI) == "<s>user:hi;"
    assert folder_with(tmp_path, template, bos_token="<s>", add_bos_token=False).prompt_for_engine(HI) == "<s>user:hi;"


def test_tokens_and_back(tmp_path: Path) -> None:
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    model = folder_with(tmp_path, model_max_length=2048)
    assert model.tokens("hello you", add_special_tokens=True) == ([1, 3, 4], ["<s>", "hello", "you"])
    assert model.tokens("hello you", add_special_tokens=False)[0] == [3, 4]
    assert model.text([1, 3, 4]) == "<s> hello you"
    assert model.max_length == 2048
    with pytest.raises(ApiError, match="Token id 9 is not in the vocabulary of 5 tokens"):
        model.text([9])


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="the model has no tokenizer.json"):
        folder_with(tmp_path).tokens("x", add_special_tokens=True)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ApiError, match="the model's tokenizer.json is wrong"):
        folder_with(tmp_path).tokens("x", add_special_tokens=True)


def test_files_are_read_again_when_they_have_changed(tmp_path: Path) -> None:
    folder_with(tmp_path, "first")
    assert texts_of(str(tmp_path)).prompt(HI) == "first"
    assert texts_of(str(tmp_path)) is texts_of(str(tmp_path))
    file = tmp_path / "chat_template.jinja"
    file.write_text("other")
    os.utime(file, ns=(1, 1))
    assert texts_of(str(tmp_path)).prompt(HI) == "other"

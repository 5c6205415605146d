"""Calls of tools are found in the text of models, wherever its pieces end, and nothing of it is lost."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.model_parameters import TOOL_PARSERS
from kernel.errors import InvalidArgument
from kernel.extensions import extension, import_extensions
from protocols.openai.tools import (
    LIST_PARSER,
    MAX_CALL,
    MOST_CALLS,
    FoundCall,
    MoreArguments,
    NamedCall,
    ToolText,
    new_parser,
)

if TYPE_CHECKING:
    from pathlib import Path

Found = list[str | tuple[str, object]]

AB: Found = [("a", {"x": 1}), ("b", {"y": ["}]", {"z": None}]})]

#: Parser, text, and what is in it: text, and the names and arguments of calls.
TEXTS: list[tuple[str, str, Found]] = [
    ("hermes", "just text", ["just text"]),
    ("hermes", "  \n", ["  \n"]),
    ("hermes", 'Hm.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>', ["Hm.", ("a", {"x": 1})]),
    ("hermes", '<tool_call>{"name":"a","arguments":{"x":1}}</tool_call>\n\n<tool_call>{"name":"b","arguments":'
     '{"y":["}]",{"z":null}]}}</tool_call>\n', AB),
    ("hermes", '<tool_call>{"name":"a","arguments":{"x":1}}', [("a", {"x": 1})]),
    ("hermes", '<tool_call>{"name":"a","arguments":{"x":1}}</tool', [("a", {"x": 1})]),
    ("hermes", '<tool_call>{"name":"a","argu', ['<tool_call>{"name":"a","argu']),
    ("hermes", "1 <tool_cal 2 <tool_call>no</tool_call> 3", ["1 <tool_cal 2 <tool_call>no</tool_call> 3"]),
    ("hermes", '<tool_call>{"name":"a"}</tool_call> and text', [("a", {}), " and text"]),
    ("qwen3", "<think>\nso\n</think>\n\n<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n<parameter=t>\n"
     "two\nlines\n</parameter>\n</function>\n</tool_call>",
     ["<think>\nso\n</think>", ("a", {"x": 1, "t": "two\nlines"})]),
    ("llama3", '{"name": "a", "parameters": {"x": 1}}', [("a", {"x": 1})]),
    ("llama3", '\n<|python_tag|>{"name":"a","parameters":{"x":1}}; {"name":"b","arguments":{"y":["}]",'
     '{"z":null}]}}', AB),
    ("llama3", '{"city": "Zürich"}', ['{"city": "Zürich"}']),
    ("llama3", "It is {so}.", ["It is {so}."]),
    ("llama3", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ("llama3", '{"name": "a", "parameters": {"x": ', ['{"name": "a", "parameters": {"x": ']),
    ("llama3", '{"name": "a", "parameters": {"x": 1}} so.', [("a", {"x": 1}), " so."]),
    ("mistral", '[TOOL_CALLS] [{"name":"a","arguments":{"x":1}},{"name":"b","arguments":{"y":["}]",{"z":null}]}}]', AB),
    ("mistral", '[{"name":"a","arguments":{"x":1}}]', [("a", {"x": 1})]),
    ("mistral", '[TOOL_CALLS]a{"x":1}[TOOL_CALLS]b{"y":["}]",{"z":null}]}', AB),
    ("mistral", 'Yes.[TOOL_CALLS]a[CALL_ID]123456789[ARGS]{"x": 1}', ["Yes.", ("a", {"x": 1})]),
    ("mistral", "[1, 2] is a list", ["[1, 2] is a list"]),
    ("mistral", "[TOOL_CALLS] what {", ["[TOOL_CALLS] what {"]),
    ("mistral", '[TOOL_CALLS]a{"x":}', ['[TOOL_CALLS]a{"x":}']),
    ("pythonic", "[a(x=1), b(y=['}]', {'z': None}])]", AB),
    ("pythonic", "[m.a(x=-1.5, t=\"(]\\\"\")]", [("m.a", {"x": -1.5, "t": '(]"'})]),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("pythonic", "[a(x=open('f'))]", ["[a(x=open('f'))]"]),
    ("pythonic", "[a(1)] more", ["[a(1)] more"]),
    ("pythonic", "text [a(x=1)]", ["text [a(x=1)]"]),
    (LIST_PARSER, '[{"name":"a","parameters":{"x":1}}, {"name":"b","parameters":{"y":["}]",{"z":null}]}}]', AB),
]  # fmt: skip


def found_in(parser: str, pieces: list[str]) -> Found:
    """Return what is found, with texts beside each other joined."""
    text, found = ToolText(new_parser(parser)), []
    for piece in pieces:
        found += text.add(piece)
    found += text.end()
    joined: Found = []
    for each in found:
        if isinstance(each, FoundCall):
            joined.append((each.name, json.loads(each.arguments)))
        elif joined and isinstance(joined[-1], str):
            assert isinstance(each, str)
            joined[-1] += each
        else:
            assert isinstance(each, str)
            joined.append(each)
    return joined


@pytest.mark.parametrize(("parser", "text", "expected"), TEXTS)
def test_calls_are_found_at_every_split(parser: str, text: str, expected: Found) -> None:
    assert found_in(parser, [text]) == expected
    assert found_in(parser, list(text)) == expected
    for place in range(1, len(text)):
        assert found_in(parser, [text[:place], text[place:]]) == expected


@given(st.sampled_from(TEXTS), st.data())
def test_calls_are_found_whatever_the_pieces_are(each: tuple[str, str, Found], data: st.DataObject) -> None:
    parser, text, expected = each
    places = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert found_in(parser, pieces) == expected


_PARTS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "{", "}", "[", "]", "(", ")", ";",
          '"', "'", "\\", '{"name":"a"}', "a", " ", "\n", "<function=a>", "</function>", ",", "=", "é")  # fmt: skip


@given(st.sampled_from((*TOOL_PARSERS, LIST_PARSER)), st.lists(st.sampled_from(_PARTS), max_size=30), st.data())
def test_any_text_is_the_same_whole_and_in_pieces(parser: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = found_in(parser, [text])
    assert found_in(parser, list(text)) == whole
    assert found_in(parser, parts) == whole
    if not any(isinstance(each, tuple) for each in whole):
        assert "".join(map(str, whole)) == text  # nothing is lost


@pytest.mark.parametrize("parser", [*TOOL_PARSERS, LIST_PARSER])
@pytest.mark.parametrize(
    "text",
    ["<tool_call>" + "x" * 2_000_000, "[" * 2_000_000, '{"a' * 500_000, " " * 2_000_000, "[TOOL_CALLS]" * 100_000,
     "<tool_call>" * 100_000, "[TOOL_CALLS]" + "a" * 2_000_000],
    ids=["mark", "brackets", "objects", "blank", "marks", "begins", "names"],
)  # fmt: skip
def test_hostile_text_takes_time_in_proportion_and_is_not_kept(parser: str, text: str) -> None:
    out = ToolText(new_parser(parser))
    kept = 0
    began = time.process_time()
    for place in range(0, len(text), 7):
        kept += 7 - sum(len(each) for each in out.add(text[place : place + 7]) if isinstance(each, str))
        assert kept <= MAX_CALL + 1000
    assert time.process_time() - began < 20  # quadratic work would take minutes


def test_of_calls_that_must_not_be_parallel_the_first_counts() -> None:
    text = ToolText(new_parser("llama3"), only_first=True)
    found = text.add('{"name":"a","parameters":{}};{"name":"b","parameters":{}}') + text.end()
    assert [each.name for each in found if isinstance(each, FoundCall)] == ["a"]


def test_the_text_of_a_named_tool_is_its_arguments() -> None:
    text = ToolText(NamedCall("a"))
    assert text.add('{"x"') == [FoundCall("a", '{"x"')]
    assert text.add(":1}") == [MoreArguments(":1}")]
    assert text.end() == []


def test_an_unknown_parser_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="there is no tool parser 'nope'"):
        new_parser("nope")


def test_a_package_may_have_a_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shouted_calls.py").write_text(
        "from protocols.openai.tools import FoundCall\n\n\n"
        "class Shouted:\n"
        "    def add(self, text):\n"
        "        return [FoundCall(text[1:], '{}')] if text.startswith('!') else [text]\n\n"
        "    def end(self):\n"
        "        return []\n"
    )
    described = tmp_path / "shouted_calls-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: shouted-calls\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[naiad.tool_parsers]\nshouted = shouted_calls:Shouted\n")
    monkeypatch.syspath_prepend(tmp_path)
    extension.cache_clear()
    assert found_in("shouted", ["so ", "!run"]) == ["so", ("run", {})]
    config = ModelConfig(name="m")
    config.parameters["naiad.tool_parser"].string_value = "shouted"
    asyncio.run(import_extensions(config))
    config.parameters["naiad.tool_parser"].string_value = "nope"
    with pytest.raises(InvalidArgument, match="there is no tool parser 'nope'.*; the server has hermes, llama3"):
        asyncio.run(import_extensions(config))
    extension.cache_clear()


@pytest.mark.parametrize("pieces", [1, 7])
def test_behind_hundreds_of_marks_all_is_text(pieces: int) -> None:
    """What a response costs does not grow with the marks that a client makes its model repeat."""
    parser = new_parser("hermes")
    text = "<tool_call></tool_call>" * 2000
    size = -(-len(text) // pieces)
    found = [each for begin in range(0, len(text), size) for each in parser.add(text[begin : begin + size])]
    assert "".join(map(str, [*found, *parser.end()])) == text
    assert len(found) < 1100, "the rest is not looked at mark by mark"


MANY_CALLS = {
    "hermes": '<tool_call>{"name":"a"}</tool_call>',
    "qwen3": "<tool_call><function=a></function></tool_call>",
    "llama3": '{"name":"a"};',
    "mistral": "[TOOL_CALLS]a{}",
}


@pytest.mark.parametrize("parser", list(MANY_CALLS))
def test_behind_the_most_calls_of_a_response_all_is_text(parser: str) -> None:
    found = found_in(parser, [MANY_CALLS[parser] * (MOST_CALLS + 2)])
    *calls, rest = found
    assert calls == [("a", {})] * MOST_CALLS
    assert isinstance(rest, str)
    assert rest.count("a") >= 2, "nothing is lost"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("mistral", "[TOOL_CALLS] [" + ",".join(['{"name":"a"}'] * (MOST_CALLS + 1)) + "]"),
        ("pythonic", "[" + ",".join(["a(x=1)"] * (MOST_CALLS + 1)) + "]"),
        ("qwen3", "<tool_call>" + "<function=a></function>" * (MOST_CALLS + 1) + "</tool_call>"),
        ("qwen3", "<tool_call><function=a>" + "<parameter=b>1</parameter>" * 1025 + "</function></tool_call>"),
        ("qwen3", "<tool_call><function= ></function></tool_call>"),
    ],
)
def test_too_many_calls_in_one_value_and_one_without_a_name_are_text(parser: str, text: str) -> None:
    assert found_in(parser, [text]) == [text]

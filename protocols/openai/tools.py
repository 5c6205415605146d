"""Finds calls of tools in the text of a model, as it comes. Pure.

Models are trained to write calls in forms of their own; a parser for each form is found by name (`naiad.tool_parser`).
A parser takes pieces of text, wherever they end, and returns text and calls. A call is returned when it is complete, so
that what turns out to be none is text, and nothing of it is lost. Each character is looked at a limited number of
times, and a call has a limited length.

`ToolText` is around the parser of one choice: it numbers the calls, and drops white space between them.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.config.model_parameters import TOOL_PARSERS
from kernel.extensions import TOOL_PARSER_PACKAGES, extension
from protocols.openai.value_ends import PYTHON, ValueEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The most characters of one call, or of calls that are one value. A longer one is text.
MAX_CALL = 128 << 10

#: The same of calls that are Python, whose parser is slower.
MAX_PYTHONIC = 8 << 10

#: The most characters between the beginning of a call and its arguments: a name, and marks.
_MAX_LEAD = 256

#: The most white space that is held back, as it may be in front of a call.
_MAX_BLANK = 256

#: How many characters a state gets at once. States copy what follows a mark, and there may be many marks.
_PIECE = 4096

_WORD = re.compile(r"[A-Za-z0-9_.:/-]+")

_encode = msgspec.json.Encoder().encode


class FoundCall(msgspec.Struct, frozen=True):
    """A call of a tool."""

    name: str
    #: A JSON object.
    arguments: str


class MoreArguments(msgspec.Struct, frozen=True):
    """More of the arguments of the call before."""

    text: str


#: What comes of a text.
Found = str | FoundCall | MoreArguments


class ToolParser(Protocol):
    """Finds calls in the text of one choice. Packages may have more (group `naiad.tool_parsers`): a class."""

    def add(self, text: str) -> list[Found]:
        """Return the text and the calls that are complete with the next piece of text, in their order."""

    def end(self) -> list[Found]:
        """Return the rest: no more text comes."""


class ToolText:
    """The text and the calls of one choice."""

    def __init__(self, parser: ToolParser, *, only_first: bool = False) -> None:
        """`only_first`: calls after the first are dropped (`parallel_tool_calls`)."""
        self._parser = parser
        self._only_first = only_first
        self._blank = ""
        #: How many calls have come.
        self.count = 0

    @property
    def failures(self) -> int:
        """How often a text began like a call and was none; 0 if the parser does not count it."""
        return getattr(self._parser, "failures", 0)

    def add(self, text: str) -> list[Found]:
        """Return what is complete with the next piece of text. Calls are numbered by `count`."""
        return list(self._kept(self._parser.add(text)))

    def end(self) -> list[Found]:
        """Return the rest."""
        rest = list(self._kept(self._parser.end()))
        if self._blank and not self.count:
            rest.append(self._blank)
        self._blank = ""
        return rest

    def _kept(self, found: list[Found]) -> Iterator[Found]:
        for each in found:
            if isinstance(each, FoundCall):
                self._blank = ""
                self.count += 1
                if self.count == 1 or not self._only_first:
                    yield each
            elif isinstance(each, MoreArguments):
                yield each
            elif not each.strip() and len(self._blank) < _MAX_BLANK:
                self._blank += each
            else:
                # White space after a text waits too, as it may be in front of a call.
                text = self._blank + each
                kept = text.rstrip() or text
                self._blank = text[len(kept) :]
                yield kept


def new_parser(name: str) -> ToolParser:
    """Return a parser. Raises `InvalidArgument` if there is none of this name; loads have checked it before."""
    make: Callable[[], ToolParser] | None = _PARSERS.get(name)
    if make is None:
        loaded: Any = extension(TOOL_PARSER_PACKAGES, name)
        make = loaded
    return make()


# ---- values within a text ----------------------------------------------------------------------


def _call_of(value: object) -> FoundCall | None:
    """Return the call that a decoded value stands for."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as text in text
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return None
    return FoundCall(name, _encode(arguments).decode()) if isinstance(arguments, dict) else None


def _calls_of(text: str) -> list[FoundCall]:
    """Return the calls of a JSON object or of a list of them; none if it is something else, or too many."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return []
    found: list[FoundCall] = []
    for each in value if isinstance(value, list) else [value]:
        call = _call_of(each) if len(found) < MOST_CALLS else None
        if call is None:
            return []
        found.append(call)
    return found


def _begun(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `mark`."""
    return next((count for count in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:count])), 0)


# ---- forms --------------------------------------------------------------------------------------


#: How many calls may begin in one response; behind that, all is text. It bounds what a response costs the event loop.
_MOST_MARKS = 512

#: How many calls one response may have; what follows is text. A client's list of tools has 128 at OpenAI.
MOST_CALLS = 256


class _Parser:
    """A parser in states: each takes the text in front of it, and returns what follows, or holds it."""

    def __init__(self, state: Callable[[str, list[Found]], str]) -> None:
        self._state = state
        #: What a state needs again, with more behind it.
        self._held = ""
        #: The text of a call that is not complete, from its mark on.
        self._raw: list[str] = []
        self._raw_size = 0
        self._marks = 0
        self._call_count = 0
        #: How often a text began like a call and was none.
        self.failures = 0

    def add(self, text: str) -> list[Found]:
        """As `ToolParser.add`."""
        found: list[Found] = []
        for begin in range(0, len(text), _PIECE):
            piece, self._held = self._held + text[begin : begin + _PIECE], ""
            while piece:
                piece = self._state(piece, found)
        return found

    def end(self) -> list[Found]:
        """As `ToolParser.end`. What is not complete is text."""
        self.failures += bool(self._raw)
        rest = "".join(self._raw) + self._held
        self._drop()
        self._held = ""
        return [rest] if rest else []

    def _hold(self, text: str, found: list[Found]) -> str:
        """Hold `text` until more comes; too much of it is no call."""
        if len(text) > _MAX_LEAD:
            return self._give_up(text, found)
        self._held = text
        return ""

    def _keep(self, text: str, limit: int = MAX_CALL) -> bool:
        """Keep a part of a call; returns False if it has become too long."""
        self._raw.append(text)
        self._raw_size += len(text)
        return self._raw_size <= limit

    def _drop(self) -> str:
        """Return what was kept, which is kept no longer."""
        raw = "".join(self._raw)
        self._raw, self._raw_size = [], 0
        return raw

    def _give_up(self, rest: str, found: list[Found]) -> str:
        """What was kept is no call: this and everything behind it is text."""
        self.failures += bool(self._raw)
        found.append(self._drop() + rest)
        self._state = self._plain
        return ""

    def _plain(self, text: str, found: list[Found]) -> str:
        found.append(text)
        return ""

    def _admits(self, calls: list[FoundCall]) -> bool:
        """Whether there are calls, and the response may have them; then they count."""
        count = self._call_count + len(calls)
        if not calls or count > MOST_CALLS:
            return False
        self._call_count = count
        return True

    def _until_mark(self, text: str, found: list[Found], mark: str) -> tuple[bool, str]:
        """Pass text on up to a mark; returns whether the mark has come, and what follows it."""
        place = text.find(mark)
        if place < 0:
            kept = _begun(text, mark)
            self._held = text[len(text) - kept :]
            if kept < len(text):
                found.append(text[: len(text) - kept])
            return False, ""
        self._marks += 1
        if self._marks > _MOST_MARKS:
            self._state = self._plain
            found.append(text)
            return False, ""
        if place:
            found.append(text[:place])
        self._keep(mark)
        return True, text[place + len(mark) :]


class HermesParser(_Parser):
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`, any number of times: Hermes, Qwen 2.5 and 3, and others.

    Within the marks, Qwen 3 Coder's form is read, too: `<function=f><parameter=a>1</parameter></function>`.
    """

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__(self._content)

    def _content(self, text: str, found: list[Found]) -> str:
        marked, rest = self._until_mark(text, found, self.BEGIN)
        if marked:
            self._state = self._call
        return rest

    def _call(self, text: str, found: list[Found]) -> str:
        place = text.find(self.END)
        if place < 0:
            kept = _begun(text, self.END)
            self._held = text[len(text) - kept :]
            if not self._keep(text[: len(text) - kept]):
                return self._give_up("", found)
            return ""
        if not self._keep(text[:place]):
            return self._give_up(text[place:], found)
        raw = self._drop()
        calls = _marked_calls(raw[len(self.BEGIN) :])
        if self._admits(calls):
            found.extend(calls)
        else:
            self.failures += 1
            found.append(raw + self.END)
        self._state = self._content
        return text[place + len(self.END) :]

    def end(self) -> list[Found]:
        """As `ToolParser.end`. Of a call only the last mark may be missing: engines leave it out as a stop word."""
        if self._raw and self._admits(calls := _marked_calls("".join(self._raw)[len(self.BEGIN) :])):
            self._drop()
            rest, self._held = self._held, ""
            return [*calls, *([rest] if rest and not self.END.startswith(rest) else [])]
        return super().end()


def _marked_calls(text: str) -> list[FoundCall]:
    text = text.strip()
    return function_calls(text) if text.startswith("<function=") else _calls_of(text)


#: The most characters of the name of a function or of a parameter, and the most parameters of calls between two marks.
_MAX_NAME, _MOST_PARAMETERS = 200, 1024


def function_calls(text: str) -> list[FoundCall]:
    """Return the calls of Qwen 3 Coder's form. Values that are JSON are taken as such, others as text.

    Each character is looked for a limited number of times, also where tags begin and do not end.
    """
    found: list[FoundCall] = []
    if text.count("<parameter=") > _MOST_PARAMETERS:
        return found
    for name, begin, end in _tagged(text, "function", 0, len(text)):
        arguments = {
            key.strip(): _json_or_text(text[first:last]) for key, first, last in _tagged(text, "parameter", begin, end)
        }
        if len(found) == MOST_CALLS:
            return []
        found.append(FoundCall(name.strip(), _encode(arguments).decode()))
    return found


def _tagged(text: str, tag: str, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Find `<tag=NAME>BODY</tag>` between two places: yields the name, and where the body begins and ends."""
    opening, closing = f"<{tag}=", f"</{tag}>"
    while (place := text.find(opening, begin, end)) >= 0:
        begin = place + len(opening)
        named = text.find(">", begin, min(begin + _MAX_NAME + 1, end))
        if named < 0 or "\n" in (name := text[begin:named]) or not name.strip():
            continue
        last = text.find(closing, named + 1, end)
        if last < 0:
            return  # no other one ends either
        yield name, named + 1, last
        begin = last + len(closing)


def _json_or_text(text: str) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


class _ValueParser(_Parser):
    """A parser of calls that are JSON values, which say themselves where they end."""

    def __init__(self, state: Callable[[str, list[Found]], str]) -> None:
        super().__init__(state)
        self._value = ValueEnd()
        #: The name in front of the arguments, if it is not in the value.
        self._name = ""
        #: Where it begins in what is kept.
        self._begin = 0

    def _begin_value(self, name: str = "") -> None:
        self._value, self._name, self._begin = ValueEnd(), name, self._raw_size
        self._state = self._in_value

    def _in_value(self, text: str, found: list[Found]) -> str:
        end = self._value.find_end(text)
        if end < 0:
            return "" if self._keep(text) else self._give_up("", found)
        if not self._keep(text[:end]):
            return self._give_up(text[end:], found)
        value = "".join(self._raw)[self._begin :]
        if self._name:
            value = f'{{"name":{_encode(self._name).decode()},"arguments":{value}}}'
        calls = _calls_of(value)
        if not self._admits(calls):
            return self._give_up(text[end:], found)
        self._drop()
        found.extend(calls)
        self._state = self._between
        return text[end:]

    def _between(self, text: str, found: list[Found]) -> str:
        """Take what is between calls, or behind them."""
        raise NotImplementedError


class Llama3Parser(_ValueParser):
    """`{"name": "f", "parameters": {}}`, several with `;` between, perhaps behind `<|python_tag|>`: Llama 3."""

    MARK = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__(self._start)

    def _start(self, text: str, found: list[Found]) -> str:
        begun = text.lstrip()
        if not begun or (len(begun) < len(self.MARK) and self.MARK.startswith(begun)):
            return self._hold(text, found)
        if begun.startswith(self.MARK):
            self._keep(text[: len(text) - len(begun)] + self.MARK)
            self._state = self._marked
            return begun[len(self.MARK) :]
        return self._marked(text, found)

    def _marked(self, text: str, found: list[Found]) -> str:
        begun = text.lstrip()
        if not begun:
            return "" if self._keep(text) else self._give_up("", found)
        if begun[0] != "{":
            return self._give_up(text, found)
        self._keep(text[: len(text) - len(begun)])
        self._begin_value()
        return begun

    def _between(self, text: str, found: list[Found]) -> str:
        begun = text.lstrip()
        if begun[:1] == ";":
            self._keep(text[: len(text) - len(begun) + 1])
            self._state = self._marked
            return begun[1:]
        return self._marked(text, found)


class MistralParser(_ValueParser):
    """`[TOOL_CALLS] [{"name": "f", "arguments": {}}]`, or, since the tokenizer of version 11, `[TOOL_CALLS]f{}`, also
    `[TOOL_CALLS]f[CALL_ID]i[ARGS]{}`, any number of times: models of Mistral."""

    MARK = "[TOOL_CALLS]"

    def __init__(self) -> None:
        super().__init__(self._start)

    def _start(self, text: str, found: list[Found]) -> str:
        """Engines that leave special tokens out send the list alone."""
        begun = text.lstrip()
        if not begun or (begun[0] == "[" and not begun[1:].lstrip()):
            return self._hold(text, found)
        if begun[0] == "[" and begun[1:].lstrip()[0] == "{":
            self._begin_value()
            return text
        self._state = self._between
        return text

    def _between(self, text: str, found: list[Found]) -> str:
        marked, rest = self._until_mark(text, found, self.MARK)
        if marked:
            self._state = self._lead
        return rest

    def _lead(self, text: str, found: list[Found]) -> str:
        begun = text.lstrip()
        if begun[:1] == "[":  # the list of the older form
            self._keep(text[: len(text) - len(begun)])
            self._begin_value()
            return begun
        place = text.find("{")
        if place < 0:
            return self._hold(text, found)
        name = _WORD.match(begun)
        marks = text[len(text) - len(begun) + name.end() : place].strip() if name is not None else "none"
        if name is None or (marks and not (marks.endswith("[ARGS]") and (marks == "[ARGS]" or marks[0] == "["))):
            return self._give_up(text, found)
        self._keep(text[:place])
        self._begin_value(name[0])
        return text[place:]


class PythonicParser(_Parser):
    """`[f(a=1), g(b="x")]`: Llama 3.2's small models, Llama 4 and others."""

    def __init__(self) -> None:
        super().__init__(self._start)
        self._value = ValueEnd(PYTHON)

    def _start(self, text: str, found: list[Found]) -> str:
        begun = text.lstrip()
        if not begun:
            return self._hold(text, found)
        if begun[0] != "[":
            return self._give_up(text, found)
        self._state = self._calls
        return text

    def _calls(self, text: str, found: list[Found]) -> str:
        end = self._value.find_end(text)
        if end < 0:
            return "" if self._keep(text, MAX_PYTHONIC) else self._give_up("", found)
        if not self._keep(text[:end], MAX_PYTHONIC) or not (calls := _python_calls("".join(self._raw))):
            return self._give_up(text[end:], found)
        self._drop()
        found.extend(calls)
        self._state = self._plain
        return text[end:]


def _python_calls(text: str) -> list[FoundCall]:
    """Return the calls in a list of Python's calls, whose arguments are names and constants. Nothing is executed."""
    if text.count("(") > MOST_CALLS:  # Python's parser takes milliseconds for them
        return []
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_python_call(each) for each in tree.elts]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, OverflowError):
        return []


def _python_call(node: ast.expr) -> FoundCall:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("not a call with named arguments")
    arguments = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    return FoundCall(ast.unparse(node.func), _encode(arguments).decode())


class JsonListParser(_ValueParser):
    """`[{"name": "f", "parameters": {}}]`, and nothing else: what a schema makes models write (`tool_choice`)."""

    def __init__(self) -> None:
        super().__init__(self._start)

    def _start(self, text: str, found: list[Found]) -> str:
        if not text.strip():
            return "" if self._keep(text) else self._give_up("", found)
        self._begin_value()
        return text

    def _between(self, text: str, found: list[Found]) -> str:
        return self._plain(text, found)


class NamedCall:
    """The whole text is the arguments of one tool, by its schema (`tool_choice`). A `ToolParser`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def add(self, text: str) -> list[Found]:
        """As `ToolParser.add`."""
        if self._begun:
            return [MoreArguments(text)]
        self._begun = True
        return [FoundCall(self._name, text)]

    def end(self) -> list[Found]:
        """As `ToolParser.end`."""
        return []


#: The parser of texts that are a list of calls by their schema.
LIST_PARSER = "naiad list"

_PARSERS: dict[str, Callable[[], ToolParser]] = {
    **dict(zip(TOOL_PARSERS, (HermesParser, Llama3Parser, MistralParser, PythonicParser, HermesParser), strict=True)),
    LIST_PARSER: JsonListParser,
}

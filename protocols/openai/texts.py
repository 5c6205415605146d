"""The chat templates and tokenizers of models. Only text helpers import this module: what models bring may hang.

A model's folder has files as Hugging Face's libraries write them: `tokenizer.json`, `tokenizer_config.json`,
`chat_template.jinja`. Templates are rendered as those libraries do, so that a model reads what it was trained with: in
a sandbox whose values cannot be changed, with the same filters and functions. The sandbox does not limit time and
memory; the limits of the process do (`backends/helper`).

jinja2 and tokenizers are imported when they are first needed: they are in the extra `openai`.
"""

from __future__ import annotations

import datetime
import json
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.errors import failing_as
from kernel.texts import install_command
from protocols.openai.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

#: How many models a helper remembers.
_REMEMBERED = 16

#: The most characters of a prompt.
MAX_PROMPT = 64 << 20

#: The most characters of a text that becomes tokens: a tokenizer takes some hundred times their memory, and ends the
#: process where it gets none.
MAX_TEXT = 2 << 20

#: The most token ids that become a text.
MAX_TOKEN_IDS = 1 << 20

#: Fields of a request that templates get under the same name.
TEMPLATE_FIELDS = ("documents", "reasoning_effort", "tools")

#: Models without a limit of their own say a huge number here.
_NO_LENGTH = 1 << 40

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "chat_template.json")  # fmt: skip

_NO_TEMPLATE = (
    "Cannot use chat template functions because tokenizer.chat_template is not set: beside the model's tokenizer there "
    "is no chat_template.jinja, and no 'chat_template' in tokenizer_config.json"
)


class ModelTexts:
    """The chat template and the tokenizer of one model."""

    def __init__(self, folder: Path) -> None:
        """Read the small files of `folder`. Raises `ApiError` for a file that is not JSON."""
        self._folder = folder
        self._config = _read_json(folder / "tokenizer_config.json")
        self._special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | self._config)
        self._sources = self._read_templates()
        self._templates: dict[str, Template] = {}
        self._tokenizer: Tokenizer | None = None

    @property
    def max_length(self) -> int | None:
        """The most tokens of a text and its continuation; None if the files do not say it."""
        length = self._config.get("model_max_length")
        return int(length) if isinstance(length, (int, float)) and 0 < length < _NO_LENGTH else None

    # ---- chat templates ----------------------------------------------------------------------------

    def _read_templates(self) -> dict[str, str]:
        """Return the sources of the templates by name. A file wins over the field of the configuration."""
        given = self._config.get("chat_template") or _read_json(self._folder / "chat_template.json").get(
            "chat_template"
        )
        found = {"default": given} if isinstance(given, str) else {}
        if isinstance(given, list):
            found = {str(each["name"]): str(each["template"]) for each in given if isinstance(each, dict)}
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            found["default"] = file.read_text(encoding="utf-8")
        for more in sorted((self._folder / "additional_chat_templates").glob("*.jinja")):
            found[more.stem] = more.read_text(encoding="utf-8")
        return found

    def prompt(self, fields: dict[str, Any]) -> str:
        """Return the prompt for the checked fields of a chat. Raises `ApiError`."""
        name = "tool_use" if fields.get("tools") and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ApiError(_NO_TEMPLATE, param="model")
        continues = fields.get("continue_final_message", False)
        messages = [_for_template(each) for each in fields["messages"]]
        if "developer" not in self._sources[name]:  # an unknown role would be refused, or left out
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **{each: fields[each] for each in TEMPLATE_FIELDS if each in fields},
            **fields.get("chat_template_kwargs", {}),
            "messages": messages,
            "add_generation_prompt": not continues and fields.get("add_generation_prompt", True),
        }
        text = _rendered(self._compiled(name), variables)
        if continues:
            text = _continued(text, messages[-1])
        return text

    def prompt_for_engine(self, fields: dict[str, Any]) -> str:
        """As `prompt`, for an engine that tokenizes the text itself: without the token at the beginning of all texts,
        if its tokenizer adds that."""
        text, begin = self.prompt(fields), self._special_tokens.get("bos_token", "")
        return text[len(begin) :] if begin and text.startswith(begin) and self._adds_begin(begin) else text

    def _adds_begin(self, begin: str) -> bool:
        adds = self._config.get("add_bos_token")
        if isinstance(adds, bool):
            return adds
        return self.has_tokenizer and self.tokenizer.encode("").tokens[:1] == [begin]

    def _compiled(self, name: str) -> Template:
        from jinja2 import TemplateSyntaxError

        if name not in self._templates:
            try:
                self._templates[name] = _environment().from_string(self._sources[name])
            except TemplateSyntaxError as error:
                raise ApiError(
                    f"the model's chat template is wrong in line {error.lineno}: {error.message}", 500, param="model"
                ) from None
        return self._templates[name]

    # ---- tokenizers --------------------------------------------------------------------------------

    @property
    def has_tokenizer(self) -> bool:
        return (self._folder / "tokenizer.json").is_file()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `ApiError` if there is none, or if its file is wrong."""
        if self._tokenizer is None:
            try:
                from tokenizers import Tokenizer
            except ImportError:
                raise _not_installed("tokenizers") from None
            if not self.has_tokenizer:
                raise ApiError("the model has no tokenizer.json", param="model")
            with failing_as(  # the library has no class for its errors
                lambda error: ApiError(f"the model's tokenizer.json is wrong: {error}", 500, param="model")
            ):
                self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        return self._tokenizer

    def tokens(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """Return the token ids of a text, and the tokens. Raises `ApiError` for a text that is too long."""
        if len(text) > MAX_TEXT:
            raise ApiError(f"a text has {len(text)} characters, expected at most {MAX_TEXT}", 413)
        found = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return found.ids, found.tokens

    def text(self, tokens: list[int]) -> str:
        """Return the text of token ids, special tokens included. Raises `ApiError` for an id that is none."""
        if len(tokens) > MAX_TOKEN_IDS:
            raise ApiError(f"the request has {len(tokens)} tokens, expected at most {MAX_TOKEN_IDS}", 413,
                           param="tokens")  # fmt: skip
        size = self.tokenizer.get_vocab_size()
        for place, token in enumerate(tokens):
            if token >= size:
                raise ApiError(f"Token id {token} is not in the vocabulary of {size} tokens", 422,
                               param=f"tokens.{place}", kind="less_than")  # fmt: skip
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


#: What a helper remembers: folder → the state of its files, and what they are. The last used one is last.
_remembered: OrderedDict[str, tuple[object, ModelTexts]] = OrderedDict()


def texts_of(folder: str) -> ModelTexts:
    """Return the texts of a model's folder; its files are read again when they have changed. Raises `ApiError`."""
    path = Path(folder)
    state = tuple(_state_of(path / name) for name in (*_FILES, "additional_chat_templates"))
    known = _remembered.get(folder)
    if known is None or known[0] != state:
        _remembered.pop(folder, None)
        while len(_remembered) >= _REMEMBERED:
            _remembered.popitem(last=False)
        _remembered[folder] = known = state, ModelTexts(path)
    _remembered.move_to_end(folder)
    return known[1]


def forget_texts() -> None:
    """Forget all models: memory has run out."""
    _remembered.clear()


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no file. Raises `ApiError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the model's {path.name} is not valid JSON: {error}", 500, param="model") from None
    return found if isinstance(found, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by their names, such as `bos_token`."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: arguments of calls are objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_decoded_call(each) for each in calls]}


def _decoded_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the arguments of a tool call are not valid JSON: {error}", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _rendered(template: Template, variables: dict[str, Any]) -> str:
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError

    parts, length = [], 0
    try:
        for part in template.generate(variables):
            parts.append(part)
            length += len(part)
            if length > MAX_PROMPT:
                raise ApiError(f"the chat template makes a prompt of more than {MAX_PROMPT} characters", 500)
    except SecurityError as error:
        raise ApiError(f"the model's chat template does what it must not: {error}", 500, param="model") from None
    except (
        TemplateError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ApiError(f"the chat template refuses the messages: {error}", param="messages") from None
    return "".join(parts)


def _continued(text: str, last: dict[str, Any]) -> str:
    """Return `text` up to the end of the last message, which the model goes on with. Raises `ApiError`."""
    said = last.get("content")
    if not isinstance(said, str) or not said.strip() or (begin := text.rfind(said.strip())) < 0:
        raise ApiError("'continue_final_message' needs a last message whose text is in the prompt", param="messages")
    end = begin + len(said.strip())
    # Spaces at the end of the message stay if the template has not removed them.
    return text[: begin + len(said.lstrip())] if text.startswith(said.lstrip(), begin) else text[:end]


#: The environment of all templates, when it was first needed.
_environments: list[ImmutableSandboxedEnvironment] = []


def _environment() -> ImmutableSandboxedEnvironment:
    if not _environments:
        _environments.append(_new_environment())
    return _environments[0]


def _new_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of templates, with what they may use."""
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise _not_installed("jinja2") from None

    class Generation(Extension):
        """`{% generation %}`: what the assistant says, for training. Here it means nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _now_as
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`: jinja2's own would replace characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


#: Returns the time for `strftime_now`; tests set it.
now: Callable[[], datetime.datetime] = datetime.datetime.now


def _now_as(form: str) -> str:
    return now().strftime(form)


def _not_installed(package: str) -> ApiError:
    return ApiError(f"the server needs {package} for this: {install_command('openai')}", 501)

"""What a client has asked for, as the server needs to know it, and the JSON that the model gets. Pure.

`make_plan` is for text, `make_embedding_plan` for vectors: one request to the model for each input. Behind them are the
checks of messages and prompts. A message whose parts are all text gets their text as its content, one line for each
part, so that models need not know both forms.
"""

from __future__ import annotations

import binascii
import enum
import re
from typing import TYPE_CHECKING, Any

import msgspec

from protocols.openai.dialects import EncoderEmbeddings
from protocols.openai.errors import ApiError, invalid_field, refused_field, unknown_model
from protocols.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    EMBEDDING_FIELDS,
    RESPONSE_FIELDS,
    STREAM_OPTIONS,
    TOKENIZE_FIELDS,
    checked,
    checked_members,
    refuse_others,
)
from protocols.openai.response_requests import SENT_AS, as_chat
from protocols.openai.tools import LIST_PARSER

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocols.openai.dialects import Dialect, EmbeddingDialect
    from protocols.openai.fields import Field
    from shm.tensor import Buffer, Tensor

#: The most requests that a client's request may become.
MAX_FAN_OUT = 1024


#: How many bytes the requests to a model may have together where one request of a client becomes several, if these are
#: more than twice its body. So that a small body cannot take much memory or time.
MAX_COPIED_BYTE_SIZE = 4 << 20

#: The most tokens of the inputs of one request for embeddings, padding included, where the server makes them.
MAX_TOKENS = 1 << 20

#: The most images of one conversation, where the server takes them out of its messages.
MAX_IMAGES = 64

#: The most characters of prompts that are repeated in a response.
MAX_ECHOED = 256 << 10

#: The most characters of the name of a model that can exist: it is the name of a folder.
MAX_MODEL_NAME = 1024

#: The most characters of a tool's name.
MAX_TOOL_NAME = 256

#: What OpenAI's completions and Triton generate at most if neither client nor operator says more.
COMPLETION_TOKENS = 16

#: Fields that are in the prompt of a chat when it was rendered.
_IN_PROMPT = frozenset(
    ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents", "messages",
     "parallel_tool_calls", "reasoning_effort", "tool_choice", "tools")
)  # fmt: skip

_encoder = msgspec.json.Encoder()


class Api(enum.Enum):
    """An API whose requests become requests of a model."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    #: Makes vectors, and no text.
    EMBEDDINGS = "embeddings"
    #: Token ids of a text or of a conversation, and the text of token ids. No model is asked.
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    #: The Responses API, whose requests become those of a chat.
    RESPONSES = "responses"

    @property
    def is_chat(self) -> bool:
        return self is Api.CHAT or self is Api.RESPONSES

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that requests may have."""
        return _FIELDS[self]


_FIELDS = {
    Api.CHAT: CHAT_FIELDS,
    Api.COMPLETIONS: COMPLETION_FIELDS,
    Api.EMBEDDINGS: EMBEDDING_FIELDS,
    Api.TOKENIZE: TOKENIZE_FIELDS,
    Api.DETOKENIZE: DETOKENIZE_FIELDS,
    Api.RESPONSES: RESPONSE_FIELDS,
}


class GenerationPlan(msgspec.Struct, array_like=True):
    """One request of a client, without its texts. It becomes one request of the model for each choice.

    Of a model that makes its responses itself, it becomes one request.
    """

    api: Api
    #: As the client wrote it.
    model: str
    stream: bool = False
    #: Whether a stream has a last chunk with the usage.
    include_usage: bool = False
    prompts: int = 1
    #: Choices for each prompt.
    n: int = 1
    #: None for the model's own end.
    max_tokens: int | None = None
    stop_words: list[str] = []
    #: The text before each prompt's choices (`echo`); empty for none.
    echoed: list[str] = []
    #: Of embeddings: whether vectors are base64 of FP32, and not lists of numbers.
    as_base64: bool = False
    #: Of embeddings: how many tokens each input has, where the server has made them; else empty.
    input_tokens: list[int] = []
    #: The parser of calls of tools in the text (`protocols.openai.tools`); empty for none.
    tool_parser: str = ""
    #: The tool whose arguments the whole text is (`tool_choice`); empty for none.
    named_tool: str = ""
    #: Whether only the first call counts (`parallel_tool_calls`).
    only_first_call: bool = False
    #: Of the Responses API: the members of a response that repeat the request, as JSON.
    repeated: bytes = b""
    #: How many likely tokens a text has beside each of its own, with their log probabilities; None for no probability.
    logprobs: int | None = None

    @property
    def choices(self) -> int:
        return self.prompts * self.n


class Document(msgspec.Struct):
    """The fields of a body that ask for something, checked one by one."""

    api: Api
    fields: dict[str, Any]
    #: How many bytes the body has.
    byte_size: int
    #: As `GenerationPlan.repeated`.
    repeated: bytes = b""
    #: Where each message was in the request; None where they are its field `messages`.
    places: list[str] | None = None

    @property
    def model(self) -> str:
        name = self.fields["model"]
        assert isinstance(name, str), "the field was checked"
        return name


def read_document(body: Buffer, api: Api) -> Document:
    """Return what is in a body. Raises `ApiError`."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", param=None) from None
    fields = checked(document, api.fields)
    if len(fields["model"]) > MAX_MODEL_NAME:
        raise unknown_model(fields["model"])
    if api is Api.RESPONSES:
        chat = as_chat(fields)
        return Document(api, chat.fields, len(body), chat.repeated, chat.places)
    return Document(api, fields, len(body))


def make_plan(
    document: Document,
    dialect: Dialect,
    default_max_tokens: int | None,
    render: Callable[[dict[str, Any]], str] | None = None,
) -> tuple[GenerationPlan, list[list[Tensor]]]:
    """Return the plan, and the inputs of each request to the model, in the order of choices. Raises `ApiError`.

    `default_max_tokens` are the operator's (`--openai-default-max-tokens`), None if the operator has not said it.
    `render` returns the prompt for the fields of a chat, of a model whose dialect renders.
    """
    fields, api, ready = document.fields, document.api, dialect.ready
    if api.is_chat and not dialect.chats:
        raise ApiError(f"model '{dialect.model}' has no chat template: use /v1/completions", param="model")
    if fields.get("tool_choice") == "none":
        fields = _without_tools(fields, dialect)
    if api is Api.RESPONSES:
        refuse_others(fields, CHAT_FIELDS, dialect, SENT_AS)
    else:
        refuse_others(fields, api.fields, dialect)
    plan = GenerationPlan(
        api, document.model, fields.get("stream", False), n=fields.get("n", 1), repeated=document.repeated
    )
    _add_stream_options(plan, fields)
    if "top_logprobs" in fields and not fields.get("logprobs"):
        raise ApiError("`top_logprobs` can only be used when `logprobs` is True", param="top_logprobs")
    plan.max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens", default_max_tokens))
    if plan.max_tokens is None and not api.is_chat:
        plan.max_tokens = COMPLETION_TOKENS
    plan.stop_words = fields.get("stop", [])
    if not dialect.ready and (asked := fields.get("logprobs")):
        plan.logprobs = fields.get("top_logprobs", 0) if asked is True else asked
    common = {name: value for name, value in fields.items() if name != "max_completion_tokens"}
    if plan.max_tokens is not None:
        common["max_tokens"] = plan.max_tokens
    if api.is_chat and (dialect.renders or dialect.tool_parser):
        _add_tools(plan, fields, common, dialect)
    if api.is_chat:
        check_messages(fields["messages"], dialect, document.places)
        if dialect.renders:
            assert render is not None, "a helper renders"
            common = {name: value for name, value in common.items() if name not in _IN_PROMPT}
            if images := _images_of(fields["messages"]):
                common["images"] = images
            common["prompt"] = [render(fields)]
        else:
            common["messages"] = msgspec.Raw(_encoder.encode(fields["messages"]))  # once for all choices
    else:
        _add_prompts(plan, common, dialect)
    if plan.choices > MAX_FAN_OUT:
        raise ApiError(f"the request asks for {plan.choices} choices, expected at most {MAX_FAN_OUT}", param="n")
    if ready:
        if plan.stream:  # the server counts it (`protocols.openai.meter`); clients get it that ask for it
            common["stream_options"] = {**fields.get("stream_options", {}), "include_usage": True}
        return plan, [dialect.inputs(common)]
    return plan, _inputs(plan, common, dialect, document.byte_size)


_TOOL_FIELDS = ("parallel_tool_calls", "tool_choice", "tools")


def _without_tools(fields: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return the fields of a request that wants no call of a tool.

    A model that makes the whole response itself gets `tool_choice` and decides. Any other gets no tools.
    """
    if dialect.ready and "tool_choice" in dialect.honoured:
        return fields
    return {name: value for name, value in fields.items() if name not in _TOOL_FIELDS}


def _add_tools(plan: GenerationPlan, fields: dict[str, Any], common: dict[str, Any], dialect: Dialect) -> None:
    """Put into `plan` how calls are found in the text. Raises `ApiError`.

    A call that the client insists on is the whole text, by its schema, of models that take a prompt.
    """
    schemas, choice = _schemas_of(fields.get("tools", [])), fields.get("tool_choice", "auto")
    named = _named_tool(choice, schemas)
    if not schemas:
        return
    plan.only_first_call = fields.get("parallel_tool_calls") is False
    plan.tool_parser = dialect.tool_parser
    if choice != "auto" and dialect.renders:
        _insist(plan, common, schemas, named, dialect)
    elif not plan.tool_parser:
        raise ApiError(
            f"\"auto\" tool choice requires a tool parser, which model '{dialect.model}' does not name "
            "(parameter naiad.tool_parser)",
            param="tools",
        )


def _schemas_of(tools: list[Any]) -> dict[str, Any]:
    """Return the schemas of the arguments of tools, by name. Raises `ApiError`."""
    found = {}
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid_field(f"tools.{number}", "model_attributes_type", "Input should be a function with a name")
        if len(function["name"]) > MAX_TOOL_NAME:
            raise invalid_field(f"tools.{number}.function.name", "string_too_long",
                                f"String should have at most {MAX_TOOL_NAME} characters")  # fmt: skip
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid_field(
                f"tools.{number}.function.parameters", "dict_type", "Input should be a valid dictionary"
            )
        found[function["name"]] = parameters or {"type": "object"}
    return found


def _named_tool(choice: Any, schemas: dict[str, Any]) -> str:
    """Return the tool that the client insists on; empty if it names none. Raises `ApiError`."""
    if choice in ("auto", "required"):
        if choice == "required" and not schemas:
            raise ApiError('"required" tool choice requires CreateChatCompletionRequest.tools to be provided',
                           param="tool_choice")  # fmt: skip
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid_field("tool_choice", "literal_error",
                            "Input should be 'none', 'auto', 'required' or a function with a name")  # fmt: skip
    if not schemas:
        raise ApiError("Named tool choice requires CreateChatCompletionRequest.tools to be provided",
                       param="tool_choice")  # fmt: skip
    if name not in schemas:
        raise ApiError(f"Tool '{name}' has not been passed in `tools`.", param="tool_choice")
    return name


def _insist(
    plan: GenerationPlan, common: dict[str, Any], schemas: dict[str, Any], named: str, dialect: Dialect
) -> None:
    """Let the text be the arguments of one tool, or a list of calls. Raises `ApiError`."""
    if "response_format" not in dialect.honoured:
        raise refused_field("tool_choice", f"model '{dialect.model}' cannot be made to write by a schema")
    if "response_format" in common or "structured_outputs" in common:
        raise ApiError("'tool_choice' and 'response_format' both ask for a form of the text", param="tool_choice")
    if named:
        plan.named_tool, plan.tool_parser, schema = named, "", schemas[named]
    else:
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
            for name, parameters in schemas.items()
        ]
        plan.tool_parser = LIST_PARSER
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if plan.only_first_call:
            schema["maxItems"] = 1
    common["response_format"] = {"type": "json_schema", "json_schema": {"name": "calls", "schema": schema}}


def _add_stream_options(plan: GenerationPlan, fields: dict[str, Any]) -> None:
    if "stream_options" not in fields:
        return
    options = checked_members(fields["stream_options"], STREAM_OPTIONS, "stream_options.")
    if not plan.stream:
        raise ApiError("`stream_options` can only be used when `stream` is True", param="stream_options")
    plan.include_usage = options.get("include_usage", False)


def _add_prompts(plan: GenerationPlan, common: dict[str, Any], dialect: Dialect) -> None:
    """Put the prompts into `plan` and `common`."""
    common["prompt"] = prompts = prompts_of(common["prompt"], dialect)
    plan.prompts = len(prompts)
    if dialect.ready:
        if plan.prompts == 1:
            common["prompt"] = prompts[0]
        return
    if common.pop("echo", False):
        if not all(isinstance(each, str) for each in prompts):
            raise ApiError("'echo' is not supported with a prompt of token ids", param="echo")
        if sum(map(len, prompts)) > MAX_ECHOED:
            raise ApiError(f"'echo' is not supported with more than {MAX_ECHOED} characters of prompts", param="echo")
        plan.echoed = prompts


def _inputs(plan: GenerationPlan, common: dict[str, Any], dialect: Dialect, body_byte_size: int) -> list[list[Tensor]]:
    """Return the inputs of one request for each choice: one prompt, n=1, and seeds that differ."""
    alone = {name: value for name, value in common.items() if name != "n"}
    if plan.choices == 1:
        if "prompt" in common:
            alone["prompt"] = common["prompt"][0]
        return [dialect.inputs(alone)]
    found, limit, byte_size = [], max(MAX_COPIED_BYTE_SIZE, 2 * body_byte_size), 0
    for choice in range(plan.choices):
        prompt, number = divmod(choice, plan.n)
        if "prompt" in common:
            alone["prompt"] = common["prompt"][prompt]
        if number and "seed" in common:
            # The highest seed is followed by the lowest: all are valid.
            alone["seed"] = (common["seed"] + number + 2**63) % 2**64 - 2**63
        elif "seed" in common:
            alone["seed"] = common["seed"]
        found.append(dialect.inputs(alone))
        byte_size += sum(tensor.byte_size for tensor in found[-1])
        if byte_size > limit:
            raise ApiError(
                f"the {plan.choices} choices of the request take more than {limit} bytes together; send fewer of them "
                "at once",
                param="n",
            )
    return found


def make_embedding_plan(
    document: Document, dialect: EmbeddingDialect, tokenize: Callable[[str], list[int]] | None = None
) -> tuple[GenerationPlan, list[list[Tensor]]]:
    """Return the plan, and the inputs of each request to the model. Raises `ApiError`.

    `tokenize` returns the token ids of a text, for a model whose dialect tokenizes.
    """
    fields = document.fields
    refuse_others(fields, EMBEDDING_FIELDS, dialect)
    asked = inputs_of(fields["input"])
    if len(asked) > MAX_FAN_OUT:
        raise ApiError(f"the request has {len(asked)} inputs, expected at most {MAX_FAN_OUT}", param="input")
    if not all(isinstance(each, str) for each in asked) and "prompt_token_ids" not in dialect.honoured:
        raise refused_field("input", f"it is of token ids, and model '{dialect.model}' {dialect.reason}")
    as_base64 = fields.get("encoding_format") == "base64"
    plan = GenerationPlan(document.api, document.model, prompts=len(asked), as_base64=as_base64)
    if isinstance(dialect, EncoderEmbeddings):
        assert tokenize is not None, "a helper tokenizes"
        tokens = _tokens_of(asked, tokenize)
        plan.input_tokens = [len(each) for each in tokens]
        width = dialect.width(plan.input_tokens)
        if width * len(tokens) > MAX_TOKENS:
            raise ApiError(
                f"the inputs have {width * len(tokens)} tokens together with their padding, expected at most "
                f"{MAX_TOKENS}; send fewer of them at once",
                param="input",
            )
        return plan, [dialect.inputs({"input": each, "width": width}) for each in tokens]
    common = {name: value for name, value in fields.items() if name != "encoding_format"}
    return plan, [dialect.inputs({**common, "input": each}) for each in asked]


def _tokens_of(inputs: list[Any], tokenize: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the token ids of each input. Raises `ApiError` before they take more memory than the limit allows."""
    found, count = [], 0
    for each in inputs:
        found.append(each if isinstance(each, list) else tokenize(each))
        count += len(found[-1])
        if count > MAX_TOKENS:
            raise ApiError(
                f"the inputs have more than {MAX_TOKENS} tokens together; send fewer of them at once", 413,
                param="input",
            )  # fmt: skip
    return found


def inputs_of(value: Any) -> list[Any]:
    """Return the inputs: each a text, or a list of token ids. Raises `ApiError`."""
    if isinstance(value, str):
        inputs: list[Any] = [value]
    elif not isinstance(value, list):
        raise invalid_field("input", "string_type", "Input should be a valid string")
    else:
        inputs = [value] if value and all(is_token(each) for each in value) else value
    if not inputs:
        raise invalid_field("input", "too_short", "Value should have at least 1 item after validation, not 0")
    for number, each in enumerate(inputs):
        if not isinstance(each, str) and not (isinstance(each, list) and all(is_token(token) for token in each)):
            raise invalid_field(f"input.{number}", "string_type", "Input should be a valid string, or token ids")
        if not each:
            raise invalid_field("input", "too_short", "Value should have at least 1 item after validation, not 0")
    return inputs


_ROLES = ("developer", "system", "user", "assistant", "tool", "function")

#: Parts of a message beside text, which a model must declare. A refusal is what an assistant has said.
_OTHER_PARTS = ("image_url", "input_audio", "file")

_TEXT_PARTS = {"text": "text", "refusal": "refusal"}


def check_messages(messages: list[Any], dialect: Dialect, places: list[str] | None = None) -> None:
    """Raise `ApiError` for a value that is not a message, and for parts that the model does not take.

    `places` are the names of the messages in errors.
    """
    for number, message in enumerate(messages):
        place = f"messages.{number}" if places is None else places[number]
        if not isinstance(message, dict):
            raise invalid_field(place, "model_attributes_type", "Input should be a valid dictionary")
        role = message.get("role")
        if role is None:
            raise invalid_field(f"{place}.role", "missing", "Field required")
        if role not in _ROLES:
            raise invalid_field(f"{place}.role", "literal_error", f"Input should be one of {', '.join(_ROLES)}")
        _check_content(message.get("content"), message, place, dialect)


def _check_content(content: Any, message: dict[str, Any], place: str, dialect: Dialect) -> None:
    if content is None:
        if "content" not in message and message["role"] != "assistant":
            raise invalid_field(f"{place}.content", "missing", "Field required")
        if message["role"] not in ("assistant", "function"):
            raise invalid_field(f"{place}.content", "string_type", "Input should be a valid string")
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid_field(f"{place}.content", "string_type", "Input should be a valid string, or a list of parts")
    texts = []
    for number, part in enumerate(content):
        where = f"{place}.content.{number}"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise invalid_field(f"{where}.type", "string_type", "Input should be a valid string")
        if kind in _TEXT_PARTS:
            if not isinstance(part.get(_TEXT_PARTS[kind]), str):
                raise invalid_field(f"{where}.{_TEXT_PARTS[kind]}", "string_type", "Input should be a valid string")
            texts.append(part[_TEXT_PARTS[kind]])
        elif kind not in _OTHER_PARTS:
            raise invalid_field(f"{where}.type", "literal_error", "Input should be the type of a part: text, image_url")
        elif kind not in dialect.honoured:
            reason = f"model '{dialect.model}' {dialect.reason}"
            raise refused_field(where, f"only text message is supported, but got {kind}; {reason}")
    if len(texts) == len(content):
        message["content"] = "\n".join(texts)


_IMAGE = re.compile(r"data:image/[A-Za-z0-9.+-]{1,64};base64,")


def _images_of(messages: list[dict[str, Any]]) -> list[str]:
    """Return the images of checked messages, in base64, and leave their place to the chat template: `image` parts.

    Raises `ApiError` for an image that is somewhere else: the server fetches nothing for clients.
    """
    found: list[str] = []
    for number, message in enumerate(messages):
        if not isinstance(message.get("content"), list):
            continue
        for place, part in enumerate(message["content"]):
            if part["type"] != "image_url":
                continue
            if len(found) == MAX_IMAGES:
                raise ApiError(f"the messages have more than {MAX_IMAGES} images", param="messages")
            found.append(_image_of(part.get("image_url"), f"messages.{number}.content.{place}.image_url"))
            message["content"][place] = {"type": "image"}
    return found


def _image_of(image: Any, where: str) -> str:
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str):
        raise invalid_field(f"{where}.url", "string_type", "Input should be a valid string")
    begin = _IMAGE.match(url)
    if begin is None:
        raise refused_field(f"{where}.url", "images are sent as data:image/TYPE;base64,BYTES; the server fetches none")
    encoded = url[begin.end() :]
    try:
        binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError as error:
        raise invalid_field(f"{where}.url", "value_error", f"Input should be an image in base64: {error}") from None
    return encoded


def prompts_of(prompt: Any, dialect: Dialect) -> list[Any]:
    """Return the prompts in the field `prompt`: each a text, or a list of token ids if the model takes these.

    Raises `ApiError`.
    """
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise invalid_field("prompt", "string_type", "Input should be a valid string, or a list")
    elif prompt and all(is_token(each) for each in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts:
        raise ApiError("prompt must be non-empty", param="prompt")
    for number, each in enumerate(prompts):
        if isinstance(each, str):
            if not each:
                raise ApiError("prompt must be non-empty", param="prompt")
        elif not isinstance(each, list) or not all(is_token(token) for token in each):
            raise invalid_field(f"prompt.{number}", "string_type", "Input should be a valid string, or token ids")
        elif "prompt_token_ids" not in dialect.honoured:
            raise refused_field("prompt", f"it is of token ids, and model '{dialect.model}' {dialect.reason}")
        elif not each:
            raise ApiError("prompt must be non-empty", param="prompt")
    return prompts


def is_token(value: Any) -> bool:
    """Whether `value` is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

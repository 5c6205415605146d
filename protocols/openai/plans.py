"""What a client has asked for, as the server needs to know it, and the JSON that the model gets. Pure.

`make_plan` is for text, `make_embedding_plan` for vectors: one request to the model for each input. Behind them are the
checks of messages and prompts. A message whose parts are all text gets their text as its content, one line for each
part, so that models need not know both forms.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from protocols.openai.errors import ApiError, invalid_field, refused_field
from protocols.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    EMBEDDING_FIELDS,
    RESPONSE_FIELDS,
    STREAM_OPTIONS,
    checked,
    checked_members,
    refuse_others,
)
from protocols.openai.responses_api import SENT_AS, as_chat

if TYPE_CHECKING:
    from protocols.openai.dialects import Dialect, EmbeddingDialect
    from protocols.openai.fields import Field
    from shm.tensor import Buffer, Tensor

#: The most requests that a client's request may become.
MAX_FAN_OUT = 1024


#: How many bytes the requests to a model may have together where one request of a client becomes several, if these are
#: more than twice its body. So that a small body cannot take much memory or time.
MAX_COPIED_BYTE_SIZE = 4 << 20

#: The most characters of prompts that are repeated in a response.
MAX_ECHOED = 256 << 10

#: What OpenAI's completions and Triton generate at most if neither client nor operator says more.
COMPLETION_TOKENS = 16

_encoder = msgspec.json.Encoder()


class Api(enum.Enum):
    """An API whose requests become requests of a model."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    #: Makes vectors, and no text.
    EMBEDDINGS = "embeddings"
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
    #: Of the Responses API: the members of a response that repeat the request, as JSON.
    repeated: bytes = b""

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
    if api is Api.RESPONSES:
        chat = as_chat(fields)
        return Document(api, chat.fields, len(body), chat.repeated, chat.places)
    return Document(api, fields, len(body))


def make_plan(
    document: Document, dialect: Dialect, default_max_tokens: int | None
) -> tuple[GenerationPlan, list[list[Tensor]]]:
    """Return the plan, and the inputs of each request to the model, in the order of choices. Raises `ApiError`.

    `default_max_tokens` are the operator's (`--openai-default-max-tokens`), None if the operator has not said it.
    """
    fields, api, ready = document.fields, document.api, dialect.ready
    if api.is_chat and not dialect.chats:
        raise ApiError(f"model '{dialect.model}' has no chat template: use /v1/completions", param="model")
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
    common = {name: value for name, value in fields.items() if name != "max_completion_tokens"}
    if plan.max_tokens is not None:
        common["max_tokens"] = plan.max_tokens
    if api.is_chat:
        check_messages(fields["messages"], dialect, document.places)
        common["messages"] = msgspec.Raw(_encoder.encode(fields["messages"]))  # once for all choices
    else:
        _add_prompts(plan, common, dialect)
    if plan.choices > MAX_FAN_OUT:
        raise ApiError(f"the request asks for {plan.choices} choices, expected at most {MAX_FAN_OUT}", param="n")
    if ready:
        return plan, [dialect.inputs(common)]
    return plan, _inputs(plan, common, dialect, document.byte_size)


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
        if not plan.api.is_chat:
            alone["prompt"] = common["prompt"][0]
        return [dialect.inputs(alone)]
    found, limit, byte_size = [], max(MAX_COPIED_BYTE_SIZE, 2 * body_byte_size), 0
    for choice in range(plan.choices):
        prompt, number = divmod(choice, plan.n)
        if not plan.api.is_chat:
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


def make_embedding_plan(document: Document, dialect: EmbeddingDialect) -> tuple[GenerationPlan, list[list[Tensor]]]:
    """Return the plan, and the inputs of each request to the model. Raises `ApiError`."""
    fields = document.fields
    refuse_others(fields, EMBEDDING_FIELDS, dialect)
    asked = inputs_of(fields["input"])
    if len(asked) > MAX_FAN_OUT:
        raise ApiError(f"the request has {len(asked)} inputs, expected at most {MAX_FAN_OUT}", param="input")
    if not all(isinstance(each, str) for each in asked) and "prompt_token_ids" not in dialect.honoured:
        raise refused_field("input", f"it is of token ids, and model '{dialect.model}' {dialect.reason}")
    as_base64 = fields.get("encoding_format") == "base64"
    plan = GenerationPlan(document.api, document.model, prompts=len(asked), as_base64=as_base64)
    common = {name: value for name, value in fields.items() if name != "encoding_format"}
    return plan, [dialect.inputs({**common, "input": each}) for each in asked]


def inputs_of(value: Any) -> list[Any]:
    """Return the inputs: each a text, or a list of token ids. Raises `ApiError`."""
    if isinstance(value, str):
        inputs: list[Any] = [value]
    elif not isinstance(value, list):
        raise invalid_field("input", "string_type", "Input should be a valid string, or a list")
    else:
        inputs = [value] if value and all(is_token(each) for each in value) else value
    if not inputs:
        raise invalid_field("input", "too_short", "List should have at least 1 item after validation, not 0")
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

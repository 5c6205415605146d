"""The functions that text helpers run, by name. Only text helpers import this module, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.serving.helper_tasks import TaskResult
from protocols.large_requests import joined
from protocols.openai.dialects import required_dialect
from protocols.openai.errors import ApiError, invalid_field
from protocols.openai.plans import check_messages, is_token, read_document
from protocols.openai.preparing import PREPARE_TEXT, arguments_decoder, failure_message, prepare_steps
from protocols.openai.texts import forget_texts, texts_of
from protocols.openai.tokenizing import DETOKENIZE, TOKENIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.config.spec import ModelSpec
    from kernel.serving.helper_tasks import TaskFunction, TaskSteps
    from protocols.openai.preparing import PrepareArguments

_encode = msgspec.json.Encoder().encode

_NO_MEMORY = "the chat template or the tokenizer needs more memory than a helper may have"


class _ModelTexts:
    """A `protocols.openai.preparing.PromptTexts`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def prompt(self, fields: dict[str, Any]) -> str:
        return texts_of(self._folder).prompt_for_engine(fields)

    def tokens(self, text: str) -> list[int]:
        texts = texts_of(self._folder)
        found, _ = texts.tokens(text, add_special_tokens=True)
        if texts.max_length is not None and len(found) > texts.max_length:
            raise ApiError(f"an input has {len(found)} tokens, and the model takes at most {texts.max_length}",
                           param="input")  # fmt: skip
        return found


def prepare_text_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """As `prepare_task`, of a chat whose messages become a prompt, and of texts that become token ids."""
    known = arguments_decoder.decode(arguments)
    try:
        return (yield from prepare_steps(known, sources, _ModelTexts(known.spec.tokenizer_folder)))
    except MemoryError:
        forget_texts()
        return TaskResult(failure_message(ApiError(_NO_MEMORY, 500, param="model")))


def tokenize_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Return the token ids of a text, or of messages."""
    yield from ()
    return _result(arguments, sources, _tokenized)


def detokenize_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Return the text of token ids."""
    yield from ()
    return _result(arguments, sources, _detokenized)


def _result(
    arguments: bytes, sources: Sequence[memoryview], make: Callable[[dict[str, Any], ModelSpec], dict[str, Any]]
) -> TaskResult:
    known: PrepareArguments = arguments_decoder.decode(arguments)
    try:
        body = _encode(make(read_document(joined(sources), known.api).fields, known.spec))
    except MemoryError:
        forget_texts()
        return TaskResult(failure_message(ApiError(_NO_MEMORY, 500, param="model")))
    except ApiError as error:
        return TaskResult(failure_message(error))
    return TaskResult(failure_message(None), [body])


def _tokenized(fields: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    if ("prompt" in fields) == ("messages" in fields):
        raise invalid_field("prompt", "missing", "One of the fields 'prompt' and 'messages' is required, and not both")
    texts = texts_of(spec.tokenizer_folder)
    if "messages" in fields:
        check_messages(fields["messages"], required_dialect(spec))
        text, special = texts.prompt(fields), False
    else:
        text, special = fields["prompt"], True
    ids, tokens = texts.tokens(text, add_special_tokens=fields.get("add_special_tokens", special))
    return {
        "count": len(ids),
        "max_model_len": texts.max_length,
        "tokens": ids,
        "token_strs": tokens if fields.get("return_token_strs") else None,
    }


def _detokenized(fields: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    for place, token in enumerate(fields["tokens"]):
        if not is_token(token):
            raise invalid_field(f"tokens.{place}", "int_type", "Input should be a valid integer, not negative")
    return {"prompt": texts_of(spec.tokenizer_folder).text(fields["tokens"])}


TASKS: dict[str, TaskFunction] = {
    PREPARE_TEXT: prepare_text_task,
    TOKENIZE: tokenize_task,
    DETOKENIZE: detokenize_task,
}

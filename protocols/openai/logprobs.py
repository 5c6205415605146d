"""Log probabilities of tokens: what vLLM's backend says of them, and what OpenAI's clients read. Pure.

The backend's output `logprobs` has a JSON list with one object for each token: token id → {logprob, rank,
decoded_token}, the token that was taken first, then the likeliest ones (`src/utils/request.py` of NVIDIA's
`vllm_backend`).
Each response is decoded by itself, and kept as the JSON that the client gets.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protocols.openai.plans import GenerationPlan

#: For what is less likely, minus infinity, or no number: JSON has none of them (vLLM's own server).
_LEAST = -9999.0

#: What the columns of a completion are called. A chat has one column.
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class _Candidate(msgspec.Struct):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None

    @property
    def text(self) -> str:
        return self.decoded_token or ""

    @property
    def bounded(self) -> float:
        return self.logprob if self.logprob >= _LEAST else _LEAST


_decoder = msgspec.json.Decoder(list[dict[str, _Candidate]] | None)

_encode = msgspec.json.Encoder().encode


class TokenLogprobs:
    """The log probabilities of all choices of a client's request, in the form of its API."""

    def __init__(self, plan: GenerationPlan) -> None:
        assert plan.logprobs is not None, "the client has asked for them"
        self._chat = plan.api.is_chat
        self._top = plan.logprobs
        #: Of each choice: where its next token begins in the text of a completion.
        self._offsets = [
            len(plan.echoed[number // plan.n]) if plan.echoed else 0 for number in range(plan.choices)
        ]  # fmt: skip

    def read(self, number: int, encoded: bytes) -> list[bytes]:
        """Return the columns of what a response of a choice says, each the JSON of some elements; empty for none.

        Raises `InternalError` if it is not what vLLM's backend writes.
        """
        tokens = [list(each.values()) for each in _decoded(encoded) or () if each]
        if not tokens:
            return []
        try:
            if self._chat:
                return [_elements(self._content(each) for each in tokens)]
            return [_elements(column) for column in self._table(number, tokens)]
        except UnicodeEncodeError as error:
            raise _other_form(error) from None

    def members(self, columns: Sequence[Sequence[bytes]]) -> bytes:
        """Return the object that a client reads, of what `read` has returned."""
        if not columns:
            return b"null"
        joined = [b",".join(parts) for parts in zip(*columns, strict=True)]
        if self._chat:
            return b'{"content":[%b],"refusal":null}' % joined[0]
        return b"{%b}" % b",".join(
            b'"%b":[%b]' % (name.encode(), column) for name, column in zip(_COLUMNS, joined, strict=True)
        )

    def _content(self, candidates: list[_Candidate]) -> dict[str, Any]:
        likeliest = [each for each in candidates if each.rank is None or each.rank <= self._top]
        likeliest.sort(key=lambda each: -each.bounded)
        return {**_entry(candidates[0]), "top_logprobs": [_entry(each) for each in likeliest[: self._top]]}

    def _table(self, number: int, tokens: list[list[_Candidate]]) -> tuple[list[Any], ...]:
        offsets = []
        for candidates in tokens:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(candidates[0].text)
        return (
            [each[0].text for each in tokens],
            [each[0].bounded for each in tokens],
            [{candidate.text: candidate.bounded for candidate in each} for each in tokens],
            offsets,
        )


def _entry(candidate: _Candidate) -> dict[str, Any]:
    text = candidate.text
    return {"token": text, "logprob": candidate.bounded, "bytes": list(text.encode())}


def _elements(values: Iterable[Any]) -> bytes:
    return b",".join(map(_encode, values))


def _decoded(encoded: bytes) -> list[dict[str, _Candidate]] | None:
    found: list[dict[str, _Candidate]] | None
    try:
        found = _decoder.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:  # the backend's JSON may have -Infinity
            found = msgspec.convert(json.loads(encoded), list[dict[str, _Candidate]] | None)
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            raise _other_form(error) from None
    return found


def _other_form(error: Exception) -> InternalError:
    return InternalError(f"the model's output 'logprobs' is not what vLLM's backend writes: {error}")

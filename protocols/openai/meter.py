"""Counts the tokens of one client's request, and how long they took. Pure: the caller knows the time.

What has come together is counted together: a stream of thousands of tokens a second costs little more for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.observe.generation_statistics import GenerationStatistics

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from protocols.openai.api_keys import KeyUse
    from protocols.openai.pieces import Piece


#: About how many bytes of text a token has.
_BYTES_OF_TOKEN = 4


class GenerationCounts:
    """The statistics of all models of one server, by name and version."""

    def __init__(self) -> None:
        self.by_model: dict[tuple[str, str], GenerationStatistics] = {}

    def of(self, name: str, version: str, ready: Collection[str]) -> GenerationStatistics:
        """Return the statistics of a model version. Forgets models that are gone, `ready` are those that are not."""
        found = self.by_model.get((name, version))
        if found is None:
            self.by_model = {key: each for key, each in self.by_model.items() if key[0] in ready}
            found = self.by_model[name, version] = GenerationStatistics()
        return found


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_ready_decoder = msgspec.json.Decoder(_WithUsage)


class GenerationMeter:
    """Counts what comes of one client's request. A block of it ends with the response, or with the client."""

    def __init__(
        self,
        statistics: GenerationStatistics,
        choices: int,
        begin_ns: int,
        use: KeyUse | None = None,
        *,
        stream: bool,
        ready: bool,
        whole: bool = False,
    ) -> None:
        """`begin_ns` is when the client's request came. `ready`: whether the model makes its responses itself.
        `whole`: whether a choice is one response, of a model that is not decoupled.

        `use` is that of the client's API key, if it has limits.
        """
        self._statistics = statistics
        self._use = use
        self._begin_ns = begin_ns
        self._stream = stream
        self._ready = ready
        self._whole = whole
        #: Of each choice: when its first and its last token came, 0 before it, and how many there were.
        self._first_ns = [0] * choices
        self._last_ns = [0] * choices
        self._tokens = [0] * choices
        self._prompt_counted = [False] * choices
        #: What `add` has taken since the last call of `came`.
        self._new_tokens = self._new_responses = 0

    def __enter__(self) -> GenerationMeter:
        self._statistics.open_streams += self._stream
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._statistics.open_streams -= self._stream
        # The handler of a client that has left is cancelled, or cannot write; other errors are responses.
        if error is not None and (isinstance(error, ConnectionError) or not isinstance(error, Exception)):
            self._statistics.cancelled += 1

    def move(self, statistics: GenerationStatistics) -> None:
        """What comes from now on is of another version of the model: a rule of the route has chosen it."""
        if statistics is not self._statistics:
            self._statistics.open_streams -= self._stream
            statistics.open_streams += self._stream
            self._statistics = statistics

    def add(self, number: int, piece: Piece) -> None:
        """A response of a choice was taken; `came` follows."""
        tokens = piece.output_tokens
        if tokens is None:
            tokens = self._uncounted(piece.text) if piece.text else 0
            if self._ready and b'"usage"' in piece.text:
                tokens = self._ready_tokens(number, piece.text)
        if tokens:
            self._new_tokens += tokens
            self._new_responses += 1
        if piece.prompt_tokens is not None and not self._prompt_counted[number]:
            self._count_prompt(number, piece.prompt_tokens)

    def add_texts(self, count: int) -> None:
        """`count` responses of a choice were taken that are nothing but text of a stream; `came` follows."""
        self._new_tokens += count
        self._new_responses += count

    def _uncounted(self, text: bytes) -> int:
        """Return how many tokens a text stands for whose count the model does not say: one of a stream, else more."""
        return max(len(text) // _BYTES_OF_TOKEN, 1) if self._whole else 1

    def _count_prompt(self, number: int, tokens: int) -> None:
        self._prompt_counted[number] = True
        self._statistics.prompt_tokens += tokens
        if self._use is not None:
            self._use.spend(tokens)

    def _ready_tokens(self, number: int, text: bytes) -> int:
        """Return how many tokens a chunk or a body has that has a usage: those that were not counted before."""
        try:
            usage = _ready_decoder.decode(text).usage
        except (msgspec.DecodeError, UnicodeDecodeError):
            usage = None
        if usage is None:
            return self._uncounted(text)
        if not self._prompt_counted[number]:
            self._count_prompt(number, usage.prompt_tokens)
        return max(usage.completion_tokens - self._tokens[number] - self._new_tokens, 0)

    def came(self, number: int, now_ns: int) -> bool:
        """The responses of choice `number` that were added since the last call came at `now_ns`. Returns whether its
        first token was among them."""
        tokens, count = self._new_tokens, self._new_responses
        if not count:
            return False
        self._new_tokens = self._new_responses = 0
        statistics = self._statistics
        statistics.generation_tokens += tokens
        if self._use is not None:
            self._use.spend(tokens)
        self._tokens[number] += tokens
        is_first = not self._first_ns[number]
        if is_first:
            self._first_ns[number] = now_ns
            statistics.first_token.observe(now_ns - self._begin_ns)
            if count > 1:
                statistics.observe_pauses(0, count - 1)
        else:
            statistics.observe_pauses(now_ns - self._last_ns[number], count)
        self._last_ns[number] = now_ns
        return is_first

    def ended(self, number: int, now_ns: int, tool_failures: int = 0) -> None:
        """The model sends no more of choice `number`."""
        self.came(number, now_ns)
        statistics = self._statistics
        statistics.tool_failures += tool_failures
        statistics.durations.observe(now_ns - self._begin_ns)
        if self._tokens[number] > 1:
            statistics.per_token.observe((self._last_ns[number] - self._first_ns[number]) // (self._tokens[number] - 1))

"""Tokens of requests over OpenAI's API, and how long they took: in a clock that the test sets, and of a server."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from kernel.observe.generation_statistics import GenerationStatistics
from kernel.settings import TraceSettings, TraceValues
from protocols.openai.meter import GenerationCounts, GenerationMeter
from protocols.openai.pieces import Piece
from tests.protocols.openai.door import ASKED, CHAT, Door, config, run, talk, text_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.records.trace import TraceRecord, UsualValues
    from kernel.serving.request import Request

MS = 1_000_000


def meter(choices: int = 1, *, ready: bool = False) -> tuple[GenerationMeter, GenerationStatistics]:
    statistics = GenerationStatistics()
    return GenerationMeter(statistics, choices, 1000 * MS, stream=True, ready=ready), statistics


def test_the_first_token_counts_from_the_request_and_others_from_the_one_before() -> None:
    metered, found = meter()
    for at_ms, text in ((1050, b"a"), (1070, b"b"), (1130, b"c")):
        metered.add(0, Piece(text))
        metered.came(0, at_ms * MS)
    metered.ended(0, 1140 * MS)
    assert found.generation_tokens == 3
    assert (found.first_token.sum, found.first_token.cumulative()[-1]) == (50 * MS, 1)
    assert (found.inter_token.sum, found.inter_token.cumulative()[-1]) == (80 * MS, 2)
    assert (found.per_token.sum, found.per_token.cumulative()[-1]) == (40 * MS, 1)
    assert (found.durations.sum, found.durations.cumulative()[-1]) == (140 * MS, 1)


def test_what_the_model_counts_is_counted_and_a_prompt_once() -> None:
    metered, found = meter()
    metered.add(0, Piece(b"four tokens", prompt_tokens=9, output_tokens=4))
    metered.add(0, Piece(b"", "stop", prompt_tokens=9, output_tokens=0))
    metered.ended(0, 1100 * MS)
    assert (found.prompt_tokens, found.generation_tokens) == (9, 4)
    assert found.first_token.cumulative()[-1] == 1


def test_choices_have_clocks_of_their_own() -> None:
    metered, found = meter(2)
    metered.add(0, Piece(b"a"))
    metered.came(0, 1010 * MS)
    metered.add(1, Piece(b"a"))
    metered.came(1, 1500 * MS)
    assert found.first_token.sum == 510 * MS
    assert found.inter_token.cumulative()[-1] == 0


def test_a_choice_without_text_has_no_first_token() -> None:
    metered, found = meter()
    metered.add(0, Piece(b"", "stop"))
    metered.ended(0, 1100 * MS)
    assert found.first_token.cumulative()[-1] == found.per_token.cumulative()[-1] == found.generation_tokens == 0
    assert found.durations.cumulative()[-1] == 1


def test_chunks_that_a_model_makes_are_tokens_until_their_usage_says_more() -> None:
    metered, found = meter(ready=True)
    metered.add(0, Piece(b'{"choices":[]}'))
    metered.came(0, 1010 * MS)
    metered.add(0, Piece(b'{"choices":[],"usage":null}'))
    metered.came(0, 1020 * MS)
    assert found.generation_tokens == 2
    metered.add(0, Piece(b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":12,"total_tokens":17}}'))
    metered.ended(0, 1030 * MS)
    assert (found.prompt_tokens, found.generation_tokens) == (5, 12)


@pytest.mark.parametrize(
    ("error", "cancelled"), [(None, 0), (ValueError(), 0), (ConnectionResetError(), 1), (asyncio.CancelledError(), 1)]
)
def test_only_a_client_that_leaves_counts_as_one(error: BaseException | None, cancelled: int) -> None:
    metered, found = meter()
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)), metered:
        assert found.open_streams == 1
        if error is not None:
            raise error
    assert (found.open_streams, found.cancelled) == (0, cancelled)


def test_models_that_are_gone_are_forgotten() -> None:
    counts = GenerationCounts()
    first = counts.of("a", "1", {"a"})
    assert counts.of("a", "1", {"a"}) is first
    counts.of("b", "1", {"b"})
    assert list(counts.by_model) == [("b", "1")]


def test_a_server_counts_what_its_clients_got() -> None:
    async def test(door: Door) -> None:
        await door.stream(CHAT, ASKED)
        await door.post(CHAT, {**ASKED, "n": 2})
        [(model, found)] = door.server.figures().statistics.items()
        assert model == ("talk", "1")
        assert (found.prompt_tokens, found.generation_tokens) == (3 * 5, 3 * 8)
        for histogram in (found.first_token, found.per_token, found.durations):
            assert histogram.cumulative()[-1] == 3
        assert found.inter_token.cumulative()[-1] == 3
        assert found.open_streams == found.cancelled == 0

    def respond(script: Any, request: Request) -> None:
        script.send(request, "some", num_input_tokens=5, num_output_tokens=4)
        script.send(request, " more", num_input_tokens=5, num_output_tokens=4)
        script.end(request)

    run(test, talk(respond))


def test_a_server_counts_open_streams_and_clients_that_leave() -> None:
    async def test(door: Door) -> None:
        async with door.session.post(CHAT, json={**ASKED, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            [found] = door.server.figures().statistics.values()
            assert (found.open_streams, found.cancelled) == (1, 0)
            response.close()
        async with asyncio.timeout(60):
            while found.open_streams:  # noqa: ASYNC110  # no event says that the server has noticed
                await asyncio.sleep(0)
        assert found.cancelled == 1

    def respond(script: Any, request: Request) -> None:
        script.send(request, "some")

    run(test, talk(respond))


def test_a_body_that_a_model_makes_has_its_usage_counted() -> None:
    body = '{"choices":[{"index":0}],"usage":{"prompt_tokens":5,"completion_tokens":12,"total_tokens":17}}'

    async def test(door: Door) -> None:
        assert (await door.post(CHAT, ASKED))[0] == 200
        [found] = door.server.figures().statistics.values()
        assert (found.prompt_tokens, found.generation_tokens) == (5, 12)

    def respond(script: Any, request: Request) -> None:
        from kernel.serving.response import Response

        request.respond(Response("talk", "1", request.id, outputs=[text_tensor("openai_response", body)]))

    run(test, (config("talk", ("openai_response",)), talk(respond)[1]))


@pytest.mark.parametrize("ready", [False, True])
def test_a_whole_response_without_a_count_is_estimated_by_its_length(ready: bool) -> None:
    for text, tokens in ((b"x" * 4000, 1000), (b"x", 1), (b"", 0)):
        found = GenerationStatistics()
        metered = GenerationMeter(found, 1, 1000 * MS, stream=False, ready=ready, whole=True)
        metered.add(0, Piece(text))
        metered.ended(0, 1100 * MS)
        assert found.generation_tokens == tokens


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_a_model_that_makes_chunks_is_asked_for_its_usage_always(options: dict[str, bool] | None) -> None:
    chunks = ['{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":null}',
              '{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":12,"total_tokens":17}}']  # fmt: skip

    async def test(door: Door) -> None:
        events = await door.stream(CHAT, ASKED if options is None else {**ASKED, "stream_options": options})
        asks = options is not None and options["include_usage"]
        assert len(events) == 2 + asks
        [found] = door.server.figures().statistics.values()
        assert (found.prompt_tokens, found.generation_tokens) == (5, 12)
        assert script.asked[0]["stream_options"]["include_usage"] is True

    def respond(script: Any, request: Request) -> None:
        from kernel.serving.response import Response

        for chunk in chunks:
            outputs = [text_tensor("openai_response", chunk)]
            request.respond(Response("talk", "1", request.id, outputs=outputs, final=False))
        script.end(request)

    script = talk(respond)[1]
    run(test, (config("talk", ("openai_response",)), script))


def test_what_comes_counts_for_the_version_that_has_responded() -> None:
    from kernel.serving.response import Response

    async def test(door: Door) -> None:
        assert (await door.post(CHAT, ASKED))[0] == 200
        found = door.server.figures().statistics
        assert {key: each.generation_tokens for key, each in found.items()} == {("talk", "1"): 0, ("talk", "7"): 1}
        assert all(each.open_streams == 0 for each in found.values())

    def respond(script: Any, request: Request) -> None:
        request.respond(Response("talk", "7", request.id, outputs=[text_tensor("text_output", "a")]))

    run(test, talk(respond))


def test_a_trace_says_when_the_first_token_came() -> None:
    written: list[TraceRecord] = []

    class Output:
        """Takes traces."""

        def put(self, record: TraceRecord) -> None:
            written.append(record)

        def put_usual(self, values: UsualValues, now_ns: Callable[[], int]) -> None:
            raise AssertionError("a request with several responses is not usual")

    async def test(door: Door) -> None:
        door.lab.kernel.tracer.start(lambda values: Output())
        async with door.session.post(CHAT, json={**ASKED, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            [request] = script.requests
            script.send(request, " two")
            script.end(request)
            await response.read()

    model, script = talk(lambda script, request: script.send(request, "one"))
    run(test, (model, script), traces=TraceSettings(TraceValues(("TIMESTAMPS",), trace_rate=1, trace_file="/t")))
    [record] = written
    assert [name for name, _ in record.pairs()].count("FIRST_TOKEN") == 1


@pytest.mark.parametrize(
    ("text", "failures"),
    [("so", 0), ('<tool_call>{"name":"f"}</tool_call>', 0), ("<tool_call>no</tool_call><tool_call>neither", 2)],
)
def test_calls_of_tools_that_are_none_are_counted(text: str, failures: int) -> None:
    async def test(door: Door) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        await door.post(CHAT, {**ASKED, "tools": tools})
        await door.stream(CHAT, {**ASKED, "tools": tools})
        [found] = door.server.figures().statistics.values()
        assert found.tool_failures == 2 * failures

    def respond(script: Any, request: Request) -> None:
        script.send(request, text)
        script.end(request)

    run(test, talk(respond, more='parameters { key: "naiad.tool_parser" value { string_value: "hermes" } }'))

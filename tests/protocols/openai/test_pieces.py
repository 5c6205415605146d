"""Responses that are nothing but text take a shorter way, and clients get the same events."""

from __future__ import annotations

import random

import pytest

from kernel.errors import InternalError
from kernel.serving.response import Response
from protocols.openai.pieces import read_piece, whole_text
from protocols.openai.plans import Api, GenerationPlan
from protocols.openai.responses import Identity, TextEvents
from shm.tensor import Tensor
from tests.protocols.openai.door import outputs_of, text_tensor

NAME = "text_output"


def response(text: bytes, *, final: bool = False, error: bool = False) -> Response:
    failure = InternalError("broken") if error else None
    return Response("talk", "1", "", outputs=[text_tensor(NAME, text)], error=failure, final=final)


def test_a_text_that_ends_with_a_whole_character_is_whole() -> None:
    assert whole_text(response("aé".encode()), NAME) == "aé"
    assert whole_text(response("a\ufffdb".encode()), NAME) == "a\ufffdb"


@pytest.mark.parametrize(
    "other",
    [
        response(b""),
        response(b"a", final=True),
        response(b"a", error=True),
        response("é".encode()[:1]),
        response("a\ufffd".encode()),
        Response("talk", "1", "", final=False),
        Response("talk", "1", "", outputs=[], final=False),
        Response("talk", "1", "", outputs=outputs_of("a", num_output_tokens=1), final=False),
        Response("talk", "1", "", outputs=[text_tensor("finish_reason", "stop")], final=False),
        Response("talk", "1", "", outputs=[Tensor(NAME, "UINT8", [5], b"\1\0\0\0a")], final=False),
        Response("talk", "1", "", outputs=[Tensor(NAME, "BYTES", [2], b"\1\0\0\0a\1\0\0\0b")], final=False),
        Response("talk", "1", "", outputs=[Tensor(NAME, "BYTES", [1], b"\2\0\0\0a")], final=False),
    ],
)
def test_anything_else_is_not(other: Response) -> None:
    assert whole_text(other, NAME) is None


def test_both_ways_make_the_same_events() -> None:
    chosen = random.Random(3)
    text = 'a"\\\n\x01é\u2028😀\ufffd b'.encode()
    for number in range(400):
        api = chosen.choice((Api.CHAT, Api.COMPLETIONS))
        stop = chosen.choice(([], [], ["é"], ["never"]))
        echoed = ["begin"] if api is Api.COMPLETIONS and chosen.random() < 0.3 else []
        plan = GenerationPlan(api, "talk", stream=True, stop_words=stop, echoed=echoed)
        identity = Identity("id", 1, "talk")
        usual, shorter = TextEvents(plan, identity), TextEvents(plan, identity)
        plain_count = 0
        for _ in range(12):
            begin = chosen.randrange(len(text))
            piece = response(text[begin : begin + chosen.randint(0, 6)])
            usual.add(0, read_piece(piece, NAME))
            whole = whole_text(piece, NAME) if shorter.is_plain(0) else None
            if whole is None:
                shorter.add(0, read_piece(piece, NAME))
            else:
                shorter.add_plain(0, whole)
                plain_count += 1
        for events in (usual, shorter):
            events.end(0)
            events.end_stream()
        assert usual.take() == shorter.take(), number
        assert not plain_count or not stop

"""Responses leave in the order of the requests, in whatever order they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import EnsembleSpec
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import FakeClock, RecordingSink
from schedulers.dynamic import ResponseOrder
from schedulers.registry import choose_scheduler
from schedulers.testing import spec_of


class SharedSink(RecordingSink):
    """All requests send to one list."""


def requests(count: int) -> tuple[SharedSink, list[Request]]:
    sink = SharedSink()
    return sink, [Request("m", [], sink, id=str(number)) for number in range(count)]


def respond(request: Request, *, final: bool = True) -> None:
    request.respond(Response("m", "1", request.id, outputs=[], final=final))


def test_a_later_response_waits_for_all_earlier_ones() -> None:
    sink, (one, two, three) = requests(3)
    order = ResponseOrder()
    order.reserve([one, two, three])
    respond(three)
    respond(two)
    assert sink.responses == []
    respond(one)
    assert [response.id for response in sink.responses] == ["0", "1", "2"]
    assert len(order) == 0


def test_responses_of_the_first_request_are_not_held_until_its_last() -> None:
    sink, (one, two) = requests(2)
    order = ResponseOrder()
    order.reserve([one, two])
    respond(two, final=False)
    respond(one, final=False)
    assert [response.id for response in sink.responses] == ["0"]
    respond(one)
    assert [response.id for response in sink.responses] == ["0", "0", "1"]
    respond(two)
    assert [response.final for response in sink.responses] == [False, True, False, True]


def test_a_request_that_is_dispatched_again_keeps_its_place() -> None:
    sink, (one, two) = requests(2)
    order = ResponseOrder()
    order.reserve([one])
    order.reserve([two])
    order.reserve([one])  # its first instance was lost
    respond(two)
    respond(one)
    assert [response.id for response in sink.responses] == ["0", "1"]


def test_the_client_is_still_known() -> None:
    sink, (one,) = requests(1)
    sink.headers["x"] = "y"
    ResponseOrder().reserve([one])
    assert (one.sink.peer, one.sink.header("x")) == ("", "y")


def test_a_request_that_a_model_makes_waits_for_nobody() -> None:
    sink, (one, caller) = requests(2)
    order = ResponseOrder()
    call = Request("m", [], sink, id="call", parent=caller)
    order.reserve([one])
    order.reserve([call])
    respond(call)
    assert [response.id for response in sink.responses] == ["call"]
    assert len(order) == 1


def test_the_steps_of_an_ensemble_are_in_order_unless_a_model_has_called_it() -> None:
    sink, (one, asked, called, caller) = requests(4)
    asked.owner = called.owner = Model(
        spec_of("e", "IN", "OUT", ensemble=EnsembleSpec()), ModelConfig(), 1, choose_scheduler, FakeClock()
    )
    called.parent = caller
    order = ResponseOrder()
    of_client = Request("m", [], sink, id="of a client", parent=asked)
    of_model = Request("m", [], sink, id="of a model", parent=called)
    order.reserve([one, of_client, of_model])
    respond(of_model)
    respond(of_client)
    assert [response.id for response in sink.responses] == ["of a model"]
    respond(one)
    assert [response.id for response in sink.responses] == ["of a model", "0", "of a client"]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.randoms())
def test_every_response_leaves_once_and_in_order(counts: list[int], chance: object) -> None:
    sink, made = requests(len(counts))
    order = ResponseOrder()
    order.reserve(made)
    pending = [number for number, count in enumerate(counts) for _ in range(count)]
    chance.shuffle(pending)  # type: ignore[attr-defined]  # random.Random
    left = dict(enumerate(counts))
    for number in pending:
        left[number] -= 1
        respond(made[number], final=not left[number])
    assert [response.id for response in sink.responses] == [
        str(n) for n, count in enumerate(counts) for _ in range(count)
    ]
    assert len(order) == 0

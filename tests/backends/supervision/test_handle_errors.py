"""Errors of a worker say whether Triton would have found them before it queued the request."""

from __future__ import annotations

import pytest

from backends.transport import wire
from kernel.errors import InvalidArgument, request_prefix
from kernel.testing import RecordingSink
from tests.backends.supervision.played_worker import Bench, run, settle


@pytest.mark.parametrize(
    ("text", "before_queueing"),
    [
        (f"{request_prefix('')}expected 2 string elements, got 1", True),
        (f"{request_prefix('other')}is not the id of this request", False),
        ("the model does not like it", False),
    ],
)
def test_an_error_that_names_its_request_is_one_from_before_the_queue(text: str, before_queueing: bool) -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await settle()
        failure = wire.ResponseMessage(error_code="invalid_arg", error_text=text)
        bench.worker.channel.send(wire.Executed(2, [failure]))
        await settle()
        assert isinstance(request.sink, RecordingSink)
        (error,) = request.sink.errors
        assert isinstance(error, InvalidArgument)
        assert (error.message, error.before_queueing) == (text, before_queueing)

    run(scenario)

"""Errors of a worker say whether Triton would have found them before it queued the request."""

from __future__ import annotations

import pytest

from backends.transport import wire
from kernel.errors import InvalidArgument, request_prefix
from kernel.testing import RecordingSink
from tests.backends.supervision.played_worker import Bench, run, settle


@pytest.mark.parametrize("before_queueing", [True, False])
@pytest.mark.parametrize("text", [f"{request_prefix('')}expected 2 string elements, got 1", "the model fails"])
def test_the_worker_says_in_a_field_whether_an_error_comes_before_the_queue(text: str, before_queueing: bool) -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await settle()
        failure = wire.ResponseMessage(error_code="invalid_arg", error_text=text, error_before_queueing=before_queueing)
        await bench.say(wire.Executed(1, [failure]))
        assert isinstance(request.sink, RecordingSink)
        (error,) = request.sink.errors
        assert isinstance(error, InvalidArgument)
        assert (error.message, error.before_queueing) == (text, before_queueing)

    run(scenario)

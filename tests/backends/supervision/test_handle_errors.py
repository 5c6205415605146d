"""Errors of a worker say whether Triton would have found them before it queued the request."""

from __future__ import annotations

import pytest

from backends.transport import wire
from kernel.errors import InvalidArgument
from kernel.testing import RecordingSink
from tests.backends.supervision.played_worker import Bench, run, settle


@pytest.mark.parametrize("before_queueing", [True, False])
def test_an_error_says_whether_it_comes_before_the_queue(before_queueing: bool) -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await settle()
        failure = wire.ResponseMessage(
            error_code="invalid_arg", error_text="bad", error_before_queueing=before_queueing
        )
        bench.worker.channel.send(wire.Executed(1, [failure]))
        await settle()
        assert isinstance(request.sink, RecordingSink)
        (error,) = request.sink.errors
        assert isinstance(error, InvalidArgument)
        assert (error.message, error.before_queueing) == ("bad", before_queueing)

    run(scenario)

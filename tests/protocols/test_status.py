"""Every error code has a status in both protocols."""

from __future__ import annotations

from grpclib.const import Status

from kernel.errors import ArenaFull, DeadlineTooNear, ErrorCode, NoMemory, QueueFull, QuotaExceeded
from protocols.status import GRPC_STATUS, HTTP_STATUS, grpc_status, http_status, may_retry


def test_every_code_has_a_status_that_says_error() -> None:
    assert set(HTTP_STATUS) == set(GRPC_STATUS) == set(ErrorCode)
    assert all(400 <= status < 600 for status in HTTP_STATUS.values())
    assert Status.OK not in GRPC_STATUS.values()


def test_errors_say_whether_to_try_again() -> None:
    found = {
        type(error): (http_status(error), grpc_status(error), may_retry(error))
        for error in (
            QueueFull(""),
            DeadlineTooNear("m", 2, 1),
            QuotaExceeded("", 1),
            ArenaFull(1),
            NoMemory("too large"),
        )
    }
    assert found == {
        QueueFull: (503, Status.UNAVAILABLE, True),
        DeadlineTooNear: (503, Status.UNAVAILABLE, True),
        QuotaExceeded: (429, Status.RESOURCE_EXHAUSTED, True),
        ArenaFull: (503, Status.RESOURCE_EXHAUSTED, True),
        NoMemory: (503, Status.RESOURCE_EXHAUSTED, False),
    }

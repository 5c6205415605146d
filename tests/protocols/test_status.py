"""Every error code has a status in both protocols."""

from __future__ import annotations

from grpclib.const import Status

from kernel.errors import ErrorCode
from protocols.status import GRPC_STATUS, HTTP_STATUS


def test_every_code_has_a_status_that_says_error() -> None:
    assert set(HTTP_STATUS) == set(GRPC_STATUS) == set(ErrorCode)
    assert all(400 <= status < 600 for status in HTTP_STATUS.values())
    assert Status.OK not in GRPC_STATUS.values()

from __future__ import annotations

import errno
import os

import pytest
from grpclib.const import Status

from protocols.grpc.rpc import grpc_error
from protocols.internal_errors import unexpected_error
from protocols.status import HTTP_STATUS


def test_the_client_gets_a_number_and_the_log_everything(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ZeroDivisionError("the secret of the server")
    except ZeroDivisionError as error:
        text = unexpected_error("POST /v2", error).text
    assert "secret" not in text
    (record,) = caplog.records
    assert record.getMessage() == f"internal error {text.split()[3]} in POST /v2"
    assert record.exc_info is not None
    assert "the secret of the server" in caplog.text
    assert "Traceback" in caplog.text


def test_every_error_has_a_number_of_its_own() -> None:
    texts = {unexpected_error("a test", ValueError()).text for _ in range(10)}
    assert len(texts) == 10


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_file_descriptors_the_client_may_try_again(caplog: pytest.LogCaptureFixture, number: int) -> None:
    error = unexpected_error("POST /v2", OSError(number, os.strerror(number)))
    assert HTTP_STATUS[error.code] == 503
    assert error.text == "the server has no file descriptor left; try again later"
    status = grpc_error(OSError(number, os.strerror(number)), "ModelInfer")
    assert (status.status, status.message) == (Status.UNAVAILABLE, error.text)
    assert caplog.records == [], "it is no bug"

from __future__ import annotations

import errno
import logging
import os

import pytest
from grpclib.const import Status

from kernel.observe.internal_errors import unexpected_error
from kernel.observe.limited_log import LimitedLog
from protocols.grpc.rpc import grpc_error
from protocols.status import HTTP_STATUS
from tests.own_records import own_records


def test_the_client_gets_a_number_and_the_log_everything(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ZeroDivisionError("the secret of the server")
    except ZeroDivisionError as error:
        text = unexpected_error("POST /v2", error).text
    assert "secret" not in text
    (record,) = own_records(caplog)
    assert record.getMessage() == f"internal error {text.split()[3]} in POST /v2"
    assert record.exc_info is not None
    assert "the secret of the server" in caplog.text
    assert "Traceback" in caplog.text


def test_every_error_has_a_number_of_its_own() -> None:
    texts = {unexpected_error("a test", ValueError()).text for _ in range(10)}
    assert len(texts) == 10


@pytest.mark.usefixtures("recorded_timers")
def test_an_error_that_is_not_logged_because_it_repeats_has_the_number_of_an_equal_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel.observe.limited_log.FIRST_LINES", 2)
    monkeypatch.setattr("kernel.observe.internal_errors._log", LimitedLog(logging.getLogger("some")))
    numbers = [unexpected_error("a test", UnicodeError()).text.split()[3] for _ in range(5)]
    assert numbers[1:] == [numbers[1]] * 4
    assert [record.getMessage() for record in caplog.records] == [
        f"internal error {number} in a test" for number in numbers[:2]
    ]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_file_descriptors_the_client_may_try_again(caplog: pytest.LogCaptureFixture, number: int) -> None:
    error = unexpected_error("POST /v2", OSError(number, os.strerror(number)))
    assert HTTP_STATUS[error.code] == 503
    assert error.text == "the server has no file descriptor left; try again later"
    status = grpc_error(OSError(number, os.strerror(number)), "ModelInfer")
    assert (status.status, status.message) == (Status.UNAVAILABLE, error.text)
    assert own_records(caplog) == [], "it is no bug"

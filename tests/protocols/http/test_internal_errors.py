from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.http.internal_errors import log_internal_error

if TYPE_CHECKING:
    import pytest


def test_the_client_gets_a_number_and_the_log_everything(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ZeroDivisionError("the secret of the server")
    except ZeroDivisionError:
        text = log_internal_error("POST /v2")
    assert "secret" not in text
    (record,) = caplog.records
    assert record.getMessage() == f"internal error {text.split()[3]} in POST /v2"
    assert record.exc_info is not None

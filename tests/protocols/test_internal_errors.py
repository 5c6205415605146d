from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.internal_errors import unexpected_error

if TYPE_CHECKING:
    import pytest


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

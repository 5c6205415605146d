"""Log records that belong to the test that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

    import pytest


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records without asyncio's: it complains about tasks of earlier tests when they are collected."""
    return [record for record in caplog.records if record.name != "asyncio"]
